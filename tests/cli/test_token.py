"""`effuse token` appends a line to a file of keys only if the router will do what the flags ask."""

from __future__ import annotations

from pathlib import Path

import pytest

from effuse.cli.__main__ import main
from effuse.router.tenants import Tenant, parse_keys

DIGEST = "0" * 64


def _refused(words: list[str], keys: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The line of a refusal, which left the file unchanged."""
    before = keys.read_bytes()
    with pytest.raises(SystemExit) as ended:
        main(["token", *words, "--keys", str(keys)])
    assert ended.value.code == 2 and keys.read_bytes() == before
    told = capsys.readouterr()
    assert not told.out
    return told.err.splitlines()[0]


def test_a_line_is_appended_on_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = tmp_path / "keys"
    for words in (["alice", "--requests", "2"], ["bob"], ["alice", "--requests", "2"], ["alice"]):
        assert main(["token", *words, "--keys", str(keys)]) == 0
        keys.write_text(keys.read_text().rstrip("\n"))
    found = parse_keys(keys.read_text())
    assert [*found.values()] == [Tenant("alice", 2), Tenant("bob"), *[Tenant("alice", 2)] * 2]
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_the_first_limits_of_a_tenant_may_come_with_a_later_token(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"alice {DIGEST}\n")
    assert main(["token", "alice", "--requests", "2", "--keys", str(keys)]) == 0
    assert set(parse_keys(keys.read_text()).values()) == {Tenant("alice", 2)}


@pytest.mark.parametrize(
    "flags", [["--requests", "2"], ["--requests", "8", "--tokens-per-minute", "9"]]
)
def test_limits_that_an_earlier_line_overrules_are_refused(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"# keys\nalice {DIGEST}\nalice {'1' * 64} requests=8 # first\n")
    told = _refused(["alice", *flags], keys, capsys)
    assert f"{keys}: line 3 sets the limits of 'alice': requests=8" in told


@pytest.mark.parametrize("content", [b"alice\n", b"\xff\n"])
def test_a_broken_file_is_refused(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = tmp_path / "keys"
    keys.write_bytes(content)
    told = _refused(["bob"], keys, capsys)
    assert f"--keys: {keys}: " in told and ("line 1: expected" in told or "utf-8" in told)
