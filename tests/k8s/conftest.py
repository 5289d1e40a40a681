"""The files that pods mount, for every test of manifests."""

from __future__ import annotations

from pathlib import Path

import pytest

FILES = ("tls.crt", "tls.key", "ca.crt", "credentials", "secret", "keys")


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """The files of every Secret."""
    for name in FILES:
        (tmp_path / name).write_text("0123456789abcdef")
    return tmp_path
