"""Pools on the host are zeroed and in huge pages where the kernel has them."""

from __future__ import annotations

from pathlib import Path

from effuse.kvtransfer.layout import KVLayout, PageMemory


def test_a_pool_is_in_huge_pages_where_the_kernel_has_them() -> None:
    memory = PageMemory(KVLayout("unified", 3, 2, 4, 8, "float32"), 5)
    assert not memory.tensor.count_nonzero()
    has_them = Path("/sys/kernel/mm/transparent_hugepage").exists()
    assert ("hg" in advice_at(memory.address)) is has_them


def advice_at(address: int) -> list[str]:
    """The kernel's flags of the mapping that has an address, in its two-letter words."""
    is_there = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first and not first.endswith(":"):
            low, high = (int(end, 16) for end in first.split("-"))
            is_there = low <= address < high
        elif is_there and first == "VmFlags:":
            return rest
    raise AssertionError(f"no mapping holds {address:#x}")
