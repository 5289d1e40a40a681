"""A closed `effuse.LLM` says so."""

from __future__ import annotations

import pytest

import effuse


def test_a_closed_llm_answers_nothing_more() -> None:
    with effuse.LLM(device="cpu", max_model_len=256) as llm:
        assert len(llm.generate("a", effuse.Params(max_tokens=4))) == 1
    for prompts in ("a", ["a", "b"]):
        with pytest.raises(RuntimeError, match="this LLM is closed"):
            llm.generate(prompts)
    llm.close()
