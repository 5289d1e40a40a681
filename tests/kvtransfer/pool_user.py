"""One user of a shared pool, with a few slots of host memory."""

from __future__ import annotations

import torch

from effuse.config.pool_address import PoolAddress
from effuse.kvtransfer.host_pages import HostPages
from effuse.kvtransfer.layout import KVLayout, PageMemory
from effuse.kvtransfer.mooncake_pool import MooncakePool
from effuse.kvtransfer.stores import UnitFacts

MEMORY = PageMemory(KVLayout("unified", 4, 2, 64, 16, "float32"), 16)
KEYS = [bytes([number]) * 32 for number in range(8)]
FACTS = UnitFacts(b"d" * 16, b"a boundary row")


class PoolUser:
    """It has 16 slots of random bytes."""

    def __init__(self, address: PoolAddress, content: str = "model") -> None:
        self.host = HostPages(MEMORY, 16, is_shared=True)
        self.slots = self.host._slots
        self.slots.copy_(torch.randint(0, 255, self.slots.shape, dtype=torch.uint8))
        self.pool = MooncakePool(address, content, self.host)
        self.pool.open().result(30)

    def keep(self, key: bytes, *slots: int) -> int:
        return self.pool.keep(key, b"", lambda: FACTS, self.host.views(slots)).result(20)

    def load(self, key: bytes, *slots: int) -> UnitFacts:
        return self.pool.load(key, self.host.views(slots)).result(20)

    def count(self, *keys: bytes) -> int:
        """How many first ones of these units are there."""
        return self.pool.find(dict.fromkeys(keys, b"")).result(20)
