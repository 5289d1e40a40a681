"""A real Mooncake Store on this machine: a master, and a process with memory for objects."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from slowness import patient

from effuse.config.pool_address import PoolAddress
from effuse.kvtransfer.mooncake_pool import check_package

_START_S = 30.0


class Mooncake:
    """The two processes, which listen only on this machine. Without them the test is skipped."""

    def __init__(self, home: Path, megabytes: int = 64) -> None:
        try:
            check_package()
        except ValueError as error:
            pytest.skip(str(error))
        spec = find_spec("mooncake")
        assert spec is not None and spec.submodule_search_locations is not None
        self._programs = Path(spec.submodule_search_locations[0])
        self._home = home
        self._megabytes = megabytes
        self.port, self._metrics_port, self._memory_port = free_ports(3)
        self.url = f"mooncake://127.0.0.1:{self.port}/tests"
        self.address = PoolAddress.parse(self.url)
        self.start()

    def start(self) -> None:
        """Starts both, and waits until objects can be written."""
        self.master = self._run(
            "mooncake_master",
            *("--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1"),
            *(f"--rpc_port={self.port}", f"--metrics_port={self._metrics_port}"),
            *("--default_kv_lease_ttl=60000", "--client_ttl=5"),
        )
        await_port(self.port, self.master)
        self.memory = self._run(
            "mooncake_client",
            *("--host=127.0.0.1", "--metadata_server=P2PHANDSHAKE"),
            *(f"--port={self._memory_port}", f"--master_server_address=127.0.0.1:{self.port}"),
            f"--global_segment_size={self._megabytes} MB",
        )
        await_port(self._memory_port, self.memory)

    def close(self) -> None:
        for process in (self.memory, self.master):
            process.kill()
            process.wait(10)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """The master stands still."""
        self.master.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.master.send_signal(signal.SIGCONT)

    def idle(self) -> contextlib.AbstractContextManager[None]:
        """As `paused`, without the pause."""
        return contextlib.nullcontext()

    def fill(self) -> None:
        """Fills all room with objects that may not be evicted now."""
        self.run(
            "import time\n"
            "for size in (1 << 19, 1 << 14, 1 << 9):\n"
            "    failed = number = 0\n"
            "    while failed < 4:\n"
            "        number += 1\n"
            "        name = f'full/{size}/{number}'\n"
            "        if store.put(name, b'x' * size):\n"
            "            failed += 1\n"
            "            time.sleep(0.1)  # older objects are evicted meanwhile\n"
            "        store.is_exist(name)\n"
        )

    def run(self, script: str) -> str:
        """Output of Python code with Mooncake's own client as `store`."""
        head = (
            "from mooncake.store import MooncakeDistributedStore\n"
            "store = MooncakeDistributedStore()\n"
            "store.setup('127.0.0.1', 'P2PHANDSHAKE', 0, 1 << 24, 'tcp', '', "
            f"'127.0.0.1:{self.port}')\n"
        )
        command = [sys.executable, "-P", "-c", head + script + "\nimport os; os._exit(0)"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        return ended.stdout

    def _run(self, program: str, *flags: str) -> subprocess.Popen[bytes]:
        with (self._home / f"{program}.log").open("ab") as log:
            command = [str(self._programs / program), *flags]
            return subprocess.Popen(command, stdout=log, stderr=log, cwd=self._home)


def await_port(port: int, process: subprocess.Popen[bytes]) -> None:
    """Until a process listens there."""
    end = time.monotonic() + patient(_START_S)
    while time.monotonic() < end:
        assert process.poll() is None, f"{process.args!r} has ended"
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    raise TimeoutError(f"nothing listens at port {port}")


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        found = []
        for _ in range(count):
            one = stack.enter_context(socket.socket())
            one.bind(("127.0.0.1", 0))
            found.append(one.getsockname()[1])
    return found
