"""Every check takes what is good and names flag, form and value where it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from effuse.config import checks


def test_good_values(tmp_path: Path) -> None:
    checks.whole("port", 0, 0, 65535)
    checks.whole("port", 65535, 0, 65535)
    checks.whole("max_num_seqs", 1, 1)
    checks.whole("num_pages", None, 1)
    checks.seconds("drain_s", 1e-9)
    checks.seconds("handoff_lease_s", 60.0, 60.0)
    checks.directory("model", tmp_path)
    checks.directory("model", None)
    checks.redis_url("redis_url", "unix:///run/redis")
    checks.redis_url("redis_url", None)


@pytest.mark.parametrize(("value", "form"), [(-1, "0 to 9"), (10, "0 to 9")])
def test_a_number_out_of_range(value: int, form: str) -> None:
    with pytest.raises(ValueError, match=f"^--max-queue: expected {form}, got {value}$"):
        checks.whole("max_queue", value, 0, 9)


def test_a_number_too_small() -> None:
    with pytest.raises(ValueError, match=r"^--num-pages: expected 1 or more, got 0$"):
        checks.whole("num_pages", 0, 1)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_time_that_is_none(value: float) -> None:
    with pytest.raises(ValueError, match=f"^--drain-s: expected seconds above 0, got {value:g}$"):
        checks.seconds("drain_s", value)


def test_a_time_too_long() -> None:
    form = r"^--handoff-lease-s: expected at most 60 seconds, got 61$"
    with pytest.raises(ValueError, match=form):
        checks.seconds("handoff_lease_s", 61.0, 60.0)


def test_a_directory_that_is_a_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ValueError, match=r"^--model: expected a directory, got '.*file'$"):
        checks.directory("model", file)


def test_a_redis_without_its_scheme() -> None:
    with pytest.raises(ValueError, match=r"^--redis-url: expected redis://.*, got 'localhost'$"):
        checks.redis_url("redis_url", "localhost")
    for broken in ("redis://host:port/0", "redis://host:70000", "redis://[::1/0"):
        with pytest.raises(ValueError, match=r"^--redis-url: expected redis://"):
            checks.redis_url("redis_url", broken)


def test_a_redis_with_a_password_that_all_would_read() -> None:
    with pytest.raises(ValueError, match=r"^--redis-url: expected no password; .*file$"):
        checks.redis_url("redis_url", "redis://user:hidden@host:1/0")
