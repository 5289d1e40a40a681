"""Reflection's names: those that it finds, and that it still refuses unknown names."""

from __future__ import annotations

import pytest

import effuse.v1.generation_pb2
from effuse.protos.gate import SymbolPool

FILE = effuse.v1.generation_pb2.DESCRIPTOR.name


@pytest.mark.parametrize(
    "symbol",
    [
        "effuse.v1.GenerationService",
        "effuse.v1.GenerationService.Generate",
        "effuse.v1.GenerateRequest",
        "effuse.v1.Algorithm",
    ],
)
def test_a_known_symbol(symbol: str) -> None:
    assert SymbolPool().FindFileContainingSymbol(symbol).name == FILE


@pytest.mark.parametrize("symbol", ["effuse.v1.Nothing", "effuse.v1.GenerationService.Nothing", ""])
def test_an_unknown_symbol(symbol: str) -> None:
    with pytest.raises(KeyError):
        SymbolPool().FindFileContainingSymbol(symbol)
