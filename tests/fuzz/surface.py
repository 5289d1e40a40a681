"""One surface that strangers can reach, its inputs, and its resources meanwhile."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Final, Protocol

import psutil

MOST_FINDINGS: Final = 20
MOST_GROWTH_BYTES: Final = 96 << 20
"""Growth of a process's memory between a warm-up and the end; that of allocators stays below."""

SLACK: Final = {"tasks": 2, "descriptors": 24}
"""gRPC and ZMQ open connections, and tasks that close them, when they please."""

PATIENCE: Final = 100
"""Looks, 50 ms apart, until something that is still held is a leak."""


class RanLate(Exception):
    """No answer came in time, of which the machine may be the cause. `again` asks the same once
    more."""

    def __init__(self, told: str, again: Callable[[], Awaitable[None]]) -> None:
        super().__init__(told)
        self.again = again


class Face(Protocol):
    """The surface under test. It is entered before and left after."""

    async def feed(self, draw: random.Random) -> str:
        """Sends a drawn message; returns the name of the outcome. Every exception is a finding,
        except `RanLate`, which is one only if it comes again without other load.
        """

    def held(self) -> Mapping[str, int]:
        """Its resources while it is idle; they must be the same before and after."""


class Surface(Protocol):
    """Makes a face. `weight`: its part of all messages; `at_once`: how many are under way."""

    name: str
    weight: int
    at_once: int

    def open(self) -> AbstractAsyncContextManager[Face]: ...


@dataclass
class Report:
    """The outcome of one surface."""

    name: str
    outcomes: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)
    late: dict[str, RanLate] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def count(self) -> int:
        return self.outcomes.total()

    def tell(self) -> str:
        told = ", ".join(f"{name} {number}" for name, number in self.outcomes.most_common(8))
        rate = self.count / max(self.seconds, 1e-9)
        again = f"; {len(self.late)} were asked again alone" if self.late else ""
        return f"{self.name}: {self.count} messages, {rate:.0f} a second: {told}{again}"

    @property
    def is_broken(self) -> bool:
        """Whether so much was found that nothing more is worth asking."""
        return max(len(self.findings), len(self.late)) >= MOST_FINDINGS


async def feed(surface: Surface, seed: int, count: int) -> Report:
    """Feeds a surface; each message follows from seed, surface and number, whatever the order."""
    report, loop = Report(surface.name), asyncio.get_running_loop()
    name, warm = f"{seed}/{surface.name}", max(1, count // 4)
    async with surface.open() as face:

        async def feed_some(numbers: Iterator[int]) -> None:
            for number in numbers:
                if not report.is_broken:
                    await _feed_one(face, report, f"{name}/{number}")

        async def feed_all(numbers: range) -> None:
            shared = iter(numbers)
            await asyncio.gather(*(feed_some(shared) for _ in range(surface.at_once)))

        began = loop.time()
        await feed_all(range(1))
        try:
            before = _held(face)
        except Exception:  # noqa: BLE001  the first message came late, and has broken it
            report.findings.append(f"{name}, at its start: {traceback.format_exc(limit=-3)}")
            before = _held(face)
        await feed_all(range(1, warm))
        memory = _memory()  # allocators and caches are warm
        await feed_all(range(warm, count))
        report.seconds = loop.time() - began
        try:
            if report.late:
                await _leaks(face, before)  # until it is idle
                await _ask_again(report)
            report.findings += await _leaks(face, before)
        except Exception:  # noqa: BLE001  what came late has broken it
            report.findings.append(f"{name}, at its end: {traceback.format_exc(limit=-3)}")
        if report.is_broken and not report.findings:
            report.findings.append(f"{len(report.late)} of {report.count} ran late: too busy")
        if (growth := _memory() - memory) > MOST_GROWTH_BYTES:
            report.findings.append(f"memory has grown by {growth >> 20} MiB")
    return report


async def _feed_one(face: Face, report: Report, name: str) -> None:
    try:
        outcome = await face.feed(random.Random(name))
    except RanLate as late:
        report.outcomes["late"] += 1
        report.late[name] = late
    except Exception:  # noqa: BLE001  whatever it is, it is what is looked for
        report.outcomes["finding"] += 1
        if len(report.findings) < MOST_FINDINGS:
            report.findings.append(f"{name}: {traceback.format_exc(limit=-3)}")
    else:
        report.outcomes[outcome] += 1


async def _ask_again(report: Report) -> None:
    """Inputs that ran late, one after another: without other load a second delay is a finding."""
    for name, late in report.late.items():
        try:
            await late.again()
        except Exception:  # noqa: BLE001  as above
            report.findings.append(f"{name}, asked again alone: {traceback.format_exc(limit=-3)}")
            if len(report.findings) >= MOST_FINDINGS:
                return


def _held(face: Face) -> dict[str, int]:
    ours = {"tasks": len(asyncio.all_tasks()), "descriptors": psutil.Process().num_fds()}
    return ours | dict(face.held())


async def _leaks(face: Face, before: Mapping[str, int]) -> list[str]:
    """Resources that are still held after a while, beyond those at the start."""
    gc.collect()
    for _ in range(PATIENCE):
        after = _held(face)
        more = {
            name: (before[name], now)
            for name, now in after.items()
            if now > before[name] + SLACK.get(name, 0)
        }
        if not more:
            return []
        await asyncio.sleep(0.05)
    return [f"{name}: {was} were held before, {now} after" for name, (was, now) in more.items()]


def _memory() -> int:
    gc.collect()
    return psutil.Process(os.getpid()).memory_info().rss
