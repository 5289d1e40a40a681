"""The content of UCX's log: its tables of protocols, and their meaning for a write."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from effuse.kvtransfer.connector import UNKNOWN, Route
from effuse.kvtransfer.nixl_agent import Reader, Row, Table, UcxLog, confined, route_of

STAMP = "[1795334238.027905] [vm:18370:0]   "


def table(head: str, title: str, *rows: str) -> list[str]:
    """A table in UCX's form, except for the blanks."""
    line = "+--------+-----------+---------+"
    cells = [line, f"| {head} |", f"| {title} |", line, "| Range | Description | Config |", line]
    return [STAMP + text for text in (*cells, *(f"| {row} |" for row in rows), line)]


def read(*lines: str) -> tuple[list[Table], list[str]]:
    """The tables in these lines, and the other lines."""
    reader = Reader()
    others = [text for line in lines if (text := reader.take(line)) is not None]
    return reader.tables, others


HOST = "remote memory write by ucp_put* from host memory to host"
CUDA = "remote memory write by ucp_put*(multi) from cuda/GPU0 to cuda"
WARNING = "parser.c:2036 UCX  WARN  unused environment variable: UCX_TSL"


def test_tables_are_taken_out_and_the_rest_is_told() -> None:
    rows = (
        "0 | short | tcp/lo",
        "1..999 | zero-copy | tcp/lo",
        "16K..inf | copy-in | self/memory",
    )
    tables, others = read(
        *table("a self cfg#0", HOST, "0..inf | zero-copy | cma/memory")[:-1],
        table("a self cfg#0", HOST)[0],
        STAMP + WARNING,
        *table("a inter-node cfg#1", "active message by ucp_am_send* from host memory", *rows),
        "",
    )
    assert others == [WARNING]
    assert tables == [
        Table("self", HOST, (Row(0, None, "zero-copy", ("cma",)),)),
        Table(
            "inter-node",
            "active message by ucp_am_send* from host memory",
            (
                Row(0, 0, "short", ("tcp",)),
                Row(1, 999, "zero-copy", ("tcp",)),
                Row(16384, None, "copy-in", ("self",)),
            ),
        ),
    ]


@pytest.mark.parametrize(
    ("on_gpu", "rows", "route"),
    [
        (False, ["0..inf | zero-copy | cma/memory"], Route("cma")),
        (False, ["0..inf | zero-copy | 52% on tcp/lo and 48% on tcp/eth0"], Route("tcp")),
        (False, ["0..99 | short | tcp/lo", "100..inf | zero-copy | posix/memory"], Route("posix")),
        (True, ["0..inf | zero-copy | cuda_ipc/cuda"], Route("cuda_ipc")),
        (True, ["0..inf | zero-copy | 50% on rc_mlx5/mlx5_0:1/path0 and 50% on rc_mlx5/mlx5_1:1"],
         Route("rc_mlx5")),
        (True, ["0..inf | zero-copy | tcp/eth0"], Route("tcp", is_fallback=True)),
        (True, ["0..inf | software emulation | rc_mlx5/mlx5_0:1"],
         Route("rc_mlx5", is_fallback=True)),
        (True, ["0..100 | zero-copy | cuda_ipc/cuda"], UNKNOWN),
        (True, ["0..inf | zero-copy | "], UNKNOWN),
        (True, [], UNKNOWN),
    ],
)  # fmt: skip
def test_the_row_of_our_writes_says_what_they_take(
    on_gpu: bool, rows: list[str], route: Route
) -> None:
    """The other memory's tables and those of an agent's connection to itself do not count."""
    tables, _ = read(
        *table("a self cfg#0", CUDA if on_gpu else HOST, "0..inf | zero-copy | self/memory"),
        *table("a intra-node cfg#1", HOST if on_gpu else CUDA, "0..inf | zero-copy | xpmem/memory"),
        *table("a intra-node cfg#1", CUDA if on_gpu else HOST, *rows),
    )
    assert route_of(tables, scope="intra-node", on_gpu=on_gpu, num_bytes=4096) == route


def test_the_machine_decides_and_where_it_does_not_both_are_named() -> None:
    tables, _ = read(
        *table("a intra-node cfg#1", CUDA, "0..inf | zero-copy | cuda_ipc/cuda"),
        *table("a inter-node cfg#2", CUDA, "0..inf | zero-copy | rc_mlx5/mlx5_0:1"),
        *table("a inter-node cfg#3", CUDA, "0..inf | zero-copy | tcp/eth0"),
    )
    near = route_of(tables, scope="intra-node", on_gpu=True, num_bytes=1 << 20)
    far = route_of(tables, scope="inter-node", on_gpu=True, num_bytes=1 << 20)
    assert (near, far) == (Route("cuda_ipc"), Route("rc_mlx5 or tcp", is_fallback=True))


def test_what_moves_bytes_between_pods_of_one_node_is_known() -> None:
    """One kernel runs both; UCX treats them as two machines, because they share no namespace."""
    tables, _ = read(*table("a inter-node cfg#1", HOST, "0..inf | zero-copy | tcp/eth0"))
    assert route_of(tables, scope="intra-node", on_gpu=False, num_bytes=4096) == Route("tcp")


SCRIPT = """
import ctypes, logging, os, sys
logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(message)s", level="INFO")
from effuse.kvtransfer.nixl_agent import confined, ucx_log
log = ucx_log()
assert log is ucx_log()
libc = ctypes.CDLL(None)
libc.fopen.restype = ctypes.c_void_p
before = dict(os.environ)
with confined(log.options):
    assert os.environ["UCX_PROTO_INFO"] == before.get("UCX_PROTO_INFO", "*put*")
    file = libc.fopen(os.environ["UCX_LOG_FILE"].encode(), b"w")
assert dict(os.environ) == before
say = lambda text: libc.fputs(text.encode(), ctypes.c_void_p(file))
say("[1.5] [vm:1:0]   +---+\\n[1.5] [vm:1:0] | a intra-node cfg#1 |\\n| ucp_put* from host")
assert log.tables() == ()
say(" to host |\\n+---+\\n| Range | D | C |\\n+---+\\n")
say("| 0..inf | zero-copy | cma/memory |\\n+---+\\n")
say("[1.5] [vm:1:0] sys.c:1 UCX  WARN  something is wrong\\n")
assert [table.scope for table in log.tables()] == ["intra-node"]
assert os.fstat(log._file).st_size == 0
say("and still\\n")
assert len(log.tables()) == 1
"""


def script(**environment: str) -> str:
    """The output of the script."""
    env = {**os.environ, **environment}
    command = [sys.executable, "-P", "-c", SCRIPT]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout


def test_what_a_library_holds_back_is_read_and_the_rest_is_logged() -> None:
    assert script().splitlines() == [
        "WARNING sys.c:1 UCX  WARN  something is wrong",
        "INFO and still",
    ]


def test_who_asks_for_tables_himself_sees_them() -> None:
    lines = script(UCX_PROTO_INFO="y").splitlines()
    assert "INFO | a intra-node cfg#1 |" in lines
    assert lines[-2:] == ["WARNING sys.c:1 UCX  WARN  something is wrong", "INFO and still"]


def test_who_has_the_log_for_himself_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_LOG_FILE", "/dev/null")
    monkeypatch.delenv("UCX_PROTO_INFO", raising=False)
    log = UcxLog()
    with confined(log.options):
        assert os.environ["UCX_LOG_FILE"] == "/dev/null"
        assert "UCX_PROTO_INFO" not in os.environ
    assert log.tables() == ()
    assert os.environ["UCX_LOG_FILE"] == "/dev/null"
