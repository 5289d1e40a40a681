"""A stand-in for LMCache's server, with its protocol (0.5.6), whose objects a test may lose or
spoil.
"""

from __future__ import annotations

import random
import socketserver
import struct
import threading
from pathlib import Path

from effuse.kvtransfer.stores import HEAD

ASKED = struct.Struct("iiiiiiiii150s")


class StandIn(socketserver.ThreadingTCPServer):
    """As `lmcache.v1.server`: objects by key, with an answer to all commands but the first."""

    daemon_threads = True

    def __init__(self, _: Path | None = None) -> None:
        self.objects: dict[str, bytes] = {}
        self.is_cut = False
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"lmcache://127.0.0.1:{self.server_address[1]}/tests"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, *_: object) -> None:
        """A worker was killed."""

    def spoil(self) -> None:
        """Loses one object in four, and flips a bit of another one behind its head."""
        draw = random.Random(1)
        for at, (key, data) in enumerate(sorted(self.objects.copy().items())):
            if at % 4 == 0:
                del self.objects[key]
            elif at % 4 == 1:
                wrong = bytearray(data)
                wrong[draw.randrange(HEAD.size, len(data))] ^= 1 << draw.randrange(8)
                self.objects[key] = bytes(wrong)


class Handler(socketserver.StreamRequestHandler):
    server: StandIn

    def handle(self) -> None:
        while asked := self.rfile.read(ASKED.size):
            command, size, *_, name = ASKED.unpack(asked)
            key = name.decode().strip()
            _, world, worker, digest, dtype = key.split("@")
            assert (world, worker, dtype, len(bytes.fromhex(digest))) == ("1", "0", "uint8", 32)
            found = self.server.objects.get(key)
            if command == 1:
                self.server.objects[key] = self.rfile.read(size)
                continue
            if self.server.is_cut:
                return
            size = len(found or b"") if command == 2 else 0
            code = 200 if found is not None else 400
            self.wfile.write(struct.pack("iiiiiiiii", code, size, 4, 6, size, 0, 0, 0, 0))
            self.wfile.write(found or b"" if command == 2 else b"")
