"""Feeds every surface and prints the results: `make fuzz`.

From the root of the checkout: PYTHONPATH=src:tests python -P -m fuzz.run --count 1000000 --seed 1
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections.abc import Sequence

from fuzz.engines import ORDERS, FrontSurface
from fuzz.hosts import HostsSurface
from fuzz.http_api import HttpSurface
from fuzz.pages import PagesSurface
from fuzz.records import RecordSurface
from fuzz.services import FLEETS, RouterSurface
from fuzz.surface import Report, Surface, feed
from fuzz.transfers import HandshakeSurface, NixlSurface, ZmqSurface

SURFACES: Sequence[Surface] = (
    *(RecordSurface(), FrontSurface(), *ORDERS),
    *(ZmqSurface(), HandshakeSurface(), NixlSurface(), HostsSurface()),
    *(RouterSurface(), HttpSurface(), PagesSurface(), *FLEETS),
)


def shares(surfaces: Sequence[Surface], count: int) -> list[int]:
    """How many messages each surface gets, by its weight; `count` together, or a few more."""
    total = sum(one.weight for one in surfaces)
    return [max(1, -(-count * one.weight // total)) for one in surfaces]


async def run(surfaces: Sequence[Surface], seed: int, count: int) -> list[Report]:
    """One surface after the other."""
    reports = []
    for surface, share in zip(surfaces, shares(surfaces, count), strict=True):
        report = await feed(surface, seed, share)
        print(report.tell(), flush=True)
        for finding in report.findings:
            print(f"  FOUND {finding}", flush=True)
        reports.append(report)
    return reports


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz.run", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=1_000_000, help="messages of all surfaces")
    parser.add_argument("--only", choices=[one.name for one in SURFACES], help="only this surface")
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)  # refusals are logged, a million times
    chosen = [one for one in SURFACES if args.only in (None, one.name)]
    reports = asyncio.run(run(chosen, args.seed, args.count))
    found = sum(len(one.findings) for one in reports)
    print(f"{sum(one.count for one in reports)} messages, seed {args.seed}: {found} findings")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
