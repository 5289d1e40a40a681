"""Clients' keys: the file's form, the owner of a token, and limits by tenant."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from effuse.cli import token as command
from effuse.protos.errors import InvalidRequest, Overloaded, Unauthenticated
from effuse.protos.gate import CALLER
from effuse.router.tenants import (
    KeyRing,
    Quotas,
    QuotaShare,
    Tenant,
    line_of,
    make_token,
    parse_keys,
)


@pytest.fixture
def ring(tmp_path: Path) -> tuple[KeyRing, Path, str]:
    path, token = tmp_path / "keys", make_token()
    path.write_text(f"# ours\n\n{line_of(token, Tenant('acme', 2, 600))}\n")
    return KeyRing(path), path, token


def test_a_line_says_whose_token_it_is_and_its_limits(ring: tuple[KeyRing, Path, str]) -> None:
    keys, path, token = ring
    assert keys.find(token) == keys.tenant("acme") == Tenant("acme", 2, 600)
    assert token not in path.read_text()
    for wrong in ("", token[:-1], token + "x", "x" * 100_000, "\ud800"):
        assert keys.find(wrong) is None


@pytest.mark.parametrize(
    "line",
    ["acme", "acme abc", "a b " + "0" * 64, "acme " + "0" * 64 + " requests=0",
     "acme " + "0" * 64 + " tokens=5", "-x " + "0" * 64],
)  # fmt: skip
def test_a_line_of_another_form_is_named(line: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="line 2: expected `tenant sha256"):
        parse_keys(f"# first\n{line}\n")
    (tmp_path / "keys").write_text(line)
    with pytest.raises(OSError, match=r"--keys: .*line 1"):
        KeyRing(tmp_path / "keys")


def test_several_tokens_of_a_tenant_have_one_limit() -> None:
    lines = [
        line_of(make_token(), tenant) for tenant in (Tenant("a"), Tenant("a", 3), Tenant("a", 9))
    ]
    assert set(parse_keys("\n".join(lines)).values()) == {Tenant("a", 3)}


def test_the_file_is_read_again_when_it_changes(ring: tuple[KeyRing, Path, str]) -> None:
    keys, path, old = ring
    new = make_token()
    path.write_text(line_of(new, Tenant("other")))
    assert (keys.find(old), keys.find(new)) == (None, Tenant("other"))
    path.write_text("nonsense of another length")
    assert keys.find(new) == Tenant("other")  # the known keys stay valid
    path.unlink()
    assert keys.find(new) == Tenant("other")


def test_a_change_that_could_not_be_read_at_once_is_read_later(
    ring: tuple[KeyRing, Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example if a process has as many files open as it may: a revoked token stayed valid."""
    keys, path, old = ring
    path.write_text(line_of(make_token(), Tenant("other")))

    def refused(self: Path) -> str:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", refused)
        assert keys.find(old) == Tenant("acme", 2, 600)
    assert keys.find(old) is None


def test_a_file_that_is_gone_is_told_once_and_not_at_each_call(
    ring: tuple[KeyRing, Path, str], caplog: pytest.LogCaptureFixture
) -> None:
    keys, path, token = ring
    kept = path.rename(path.with_name("kept"))
    for times in (1, 2):
        for _ in range(3):
            assert keys.find(token) == Tenant("acme", 2, 600)
        assert caplog.text.count("keeping the previous keys") == times
        kept.rename(path)
        assert keys.find(token) == Tenant("acme", 2, 600)
        path.rename(kept)


def test_calls_show_their_token(ring: tuple[KeyRing, Path, str]) -> None:
    keys, _, token = ring
    for shown in ({}, {"authorization": token}, {"authorization": "Basic x"},
                  {"authorization": "Bearer wrong"}, {"authorization": b"Bearer"}):  # fmt: skip
        with pytest.raises(Unauthenticated):
            keys.admit(dict(shown))
    assert CALLER.get() == ""
    keys.admit({"authorization": f"bearer  {token}"})
    assert CALLER.get() == "acme"
    CALLER.set("")


def test_the_command_appends_the_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys"
    assert command.main(["acme", "--requests", "4", "--keys", str(path)]) == 0
    token = capsys.readouterr().out.strip()
    assert KeyRing(path).find(token) == Tenant("acme", 4)
    with pytest.raises(SystemExit):
        command.main(["not a name"])
    assert "got 'not a name'" in capsys.readouterr().err


def test_the_command_ends_a_last_line_that_has_no_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, first = tmp_path / "keys", make_token()
    path.write_text(line_of(first, Tenant("acme")))
    assert command.main(["other", "--keys", str(path)]) == 0
    keys, second = KeyRing(path), capsys.readouterr().out.strip()
    assert (keys.find(first), keys.find(second)) == (Tenant("acme"), Tenant("other"))


def test_the_command_prints_no_token_that_it_could_not_write_down(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(FileNotFoundError):
        command.main(["acme", "--keys", str(tmp_path / "missing" / "keys")])
    assert not capsys.readouterr().out


def test_requests_at_once_are_limited() -> None:
    quotas, tenant = Quotas(lambda: 0.0), Tenant("a", max_requests=1)
    quotas.check(tenant)
    with quotas.running(tenant):
        with pytest.raises(Overloaded, match="1 requests of this key's tenant"):
            quotas.check(tenant)
        quotas.check(Tenant("b", max_requests=1))
    quotas.check(tenant)


def test_each_answer_counts_as_a_request() -> None:
    quotas, tenant = Quotas(lambda: 0.0), Tenant("a", max_requests=4)
    with quotas.running(tenant, 3):
        quotas.check(tenant)
        told = (
            "3 requests of this key's tenant run or wait, and this request counts as 2; .* limit "
            "is 4"
        )
        with pytest.raises(Overloaded, match=told):
            quotas.check(tenant, 2)
    with quotas.running(tenant, 3) as share:
        share.end_answers(1)  # and no longer than it runs
        quotas.check(tenant, 2)
    quotas.check(tenant, 4)
    with pytest.raises(InvalidRequest, match="n: expected at most 4 answers"):
        quotas.check(tenant, 5)


STEPS = ("begin", "answer", "answer", "end")


def orders(left: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Every order in which so many steps of each request can follow one another."""
    if not any(left):
        yield ()
    for at, number in enumerate(left):
        if number:
            for rest in orders((*left[:at], number - 1, *left[at + 1 :])):
                yield (at, *rest)


def test_the_account_is_right_in_whatever_order_requests_and_their_answers_end() -> None:
    tenant = Tenant("a", max_requests=4)
    for order in orders((len(STEPS),) * 2):
        quotas, told = Quotas(lambda: 0.0), [iter(STEPS) for _ in range(2)]
        stacks, shares = [ExitStack(), ExitStack()], dict[int, QuotaShare]()
        num_running = 0
        for at in order:
            match next(told[at]):
                case "begin":
                    shares[at] = stacks[at].enter_context(quotas.running(tenant, 2))
                    num_running += 2
                case "answer":
                    shares[at].end_answers(1)
                    num_running -= 1
                case "end":
                    stacks[at].close()
            quotas.check(tenant, 4 - num_running)
            with pytest.raises((Overloaded, InvalidRequest)):
                quotas.check(tenant, 5 - num_running)


def test_tokens_a_minute_are_limited() -> None:
    now = [0.0]
    quotas, tenant = Quotas(lambda: now[0]), Tenant("a", tokens_per_minute=60)
    with quotas.running(tenant) as share:
        quotas.check(tenant)
        share.num_tokens = 90
    with pytest.raises(Overloaded, match="60 tokens a minute") as caught:
        quotas.check(tenant)
    assert caught.value.retry_after_s == 31
    now[0] = 30.0
    with pytest.raises(Overloaded):
        quotas.check(tenant)
    now[0] = 31.0
    quotas.check(tenant)
    now[0] = 1000.0  # no tenant can save tokens up
    with quotas.running(tenant) as share:
        share.num_tokens = 61
    with pytest.raises(Overloaded):
        quotas.check(tenant)
