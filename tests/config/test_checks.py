"""Every check accepts good values, and refuses others with flag, form and value."""

from __future__ import annotations

from argparse import ArgumentTypeError
from pathlib import Path

import pytest

from effuse.cli.arguments import redis_url
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
    checks.redis_url("redis_url", "redis://host")
    checks.redis_url("redis_url", "rediss://[::1]:6379/15")
    checks.redis_url("redis_url", "redis+sentinel://a:1,b/mymaster/3")
    checks.redis_url("redis_url", "rediss+sentinel://[::1]:26379/my-master.x")
    checks.redis_url("redis_url", "rediss+cluster://a.b,c:7000/0")
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
    for broken in (
        "redis://host:port/0", "redis://host:70000", "redis://[::1/0", "redis://host/x",
        "redis://host/1/2", "rediss://host/-1", "redis://host/\u0663",
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"^--redis-url: expected redis://"):
            checks.redis_url("redis_url", broken)


def test_several_servers_of_redis() -> None:
    assert checks.RedisServers.of("redis+sentinel://a,[::1]:1/m/3") == checks.RedisServers(
        (("a", 26379), ("::1", 1)), False, "m", 3
    )
    assert checks.RedisServers.of("rediss+cluster://a:7000,b") == checks.RedisServers(
        (("a", 7000), ("b", 6379)), True
    )
    assert checks.RedisServers.of("redis://a") is None


@pytest.mark.parametrize(
    ("url", "form"),
    [
        ("redis+sentinel://host:26379", "service"),
        ("redis+sentinel://host:0/m", "service"),
        ("redis+sentinel://a,,b/m", "service"),
        ("redis+sentinel://host/m/x", "service"),
        ("redis+sentinel://user:hidden@host/m", "without a user"),
        ("redis+cluster://host:65536", "cluster://host:port,host:port"),
        ("redis+cluster://host/1", "cluster://host:port,host:port"),
        ("rediss+cluster://hidden@host", "without a user"),
        ("redis+cluster://host?password=hidden", "got 'redis.cluster://..'"),
        ("redis+other://host", "://host:port/db, got"),
    ],
)
def test_several_servers_of_redis_in_a_wrong_form(url: str, form: str) -> None:
    with pytest.raises(ValueError, match=f"^--redis-url: expected redis.*{form}") as refused:
        checks.redis_url("redis_url", url)
    assert "hidden" not in str(refused.value)


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:hidden@host:1/0",
        "redis://host:1/0?password=hidden",
        "unix://s?password=hidden",
    ],
)
def test_a_redis_with_a_password_that_all_would_read(url: str) -> None:
    with pytest.raises(ValueError, match=r"^--redis-url: expected a URL without a password; .*it$"):
        checks.redis_url("redis_url", url)


@pytest.mark.parametrize(
    "url",
    [
        "rediss//user:hidden@host:1",
        "user:hidden@host:1",
        "hidden@host:1",
        "redis:/user:hidden@host:1",
        "redis://:hid/hidden?hidden@host:1",
        "redis://h:x/?password=hidden",
    ],
)
def test_a_password_in_what_is_no_redis_is_not_told(url: str) -> None:
    with pytest.raises(ValueError, match=r"^--redis-url: expected redis://host") as refused:
        checks.redis_url("redis_url", url)
    with pytest.raises(ArgumentTypeError, match="expected redis://host") as of_up:
        redis_url(url)
    assert "hidden" not in f"{refused.value}{of_up.value}"


@pytest.mark.parametrize(
    ("directory", "name"),
    [
        ("Dream-v0-Instruct-7B", "Dream-v0-Instruct-7B"),
        ("LLaDA 8B (instruct)", "LLaDA-8B-instruct"),
        ("_model..v2", "model.v2"),
        ("模型", "model"),
        (300 * "m", 256 * "m"),
    ],
)
def test_a_model_has_a_name_that_clients_can_say_whatever_its_directory_is_called(
    directory: str, name: str
) -> None:
    assert checks.as_model_name(directory) == name
    assert checks.is_model_name(name)


HASH = "abcdef0123456789abcdef0123456789abcdef01"


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (f"hub/models--JetLM--SDAR-1.7B-Chat/snapshots/{HASH}", "JetLM/SDAR-1.7B-Chat"),
        (f"hub/models--gpt2/snapshots/{HASH}", "gpt2"),
        (f"hub/models--a--b/snapshots/{HASH}/inner", "inner"),
        (f"snapshots/{HASH}", HASH),
        ("SDAR-1.7B-Chat", "SDAR-1.7B-Chat"),
    ],
)
def test_a_snapshot_in_the_cache_has_the_name_of_its_model(
    path: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the directory is reached."""
    directory = tmp_path / path
    directory.mkdir(parents=True)
    (tmp_path / "link").symlink_to(directory)
    monkeypatch.chdir(directory)
    for given in (
        directory,
        Path(f"{directory}/"),
        tmp_path / "link",
        Path(),
        Path("../") / directory.name,
    ):
        assert checks.name_of_model(given) == name


def test_a_snapshot_that_is_a_link_has_the_name_of_its_model(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    snapshots = tmp_path / "models--JetLM--SDAR/snapshots"
    snapshots.mkdir(parents=True)
    (snapshots / HASH).symlink_to(tmp_path / "weights")
    assert checks.name_of_model(snapshots / HASH) == "JetLM/SDAR"
