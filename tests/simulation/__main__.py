"""Runs one seed and prints what happens in it, or many and counts.

From the root of the checkout: PYTHONPATH=src:tests python -P -m simulation --seed 7
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections import Counter

from .cancels import cancel
from .run import Broken, Run, run


def main() -> int:
    """0 without a violation."""
    parser = argparse.ArgumentParser(prog="python -m simulation", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument(
        "--count", type=int, default=1, help="number of seeds; a single one is printed in full"
    )
    parser.add_argument("--cancels", type=int, default=0, help="number of cancels, at any event")
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    if args.cancels:
        return _cancel(args.cancels, args.seed)
    return _tell(args.seed) if args.count == 1 else _count(range(args.seed, args.seed + args.count))


def _tell(seed: int) -> int:
    found = Run(seed)
    try:
        outcome = found.go()
    except Broken as error:
        print(found.clock.told())
        print(f"{found.clock.now:9.4f}  {error}")
        return 1
    print(found.clock.told())
    print(outcome)
    return 0


def _cancel(count: int, seed: int) -> int:
    try:
        met = cancel(count, seed)
    except Broken as error:
        print(error)
        return 1
    print(f"{count} cancels left nothing behind; they met requests and handoffs that were")
    for state, number in sorted(met.items(), key=lambda one: str(one[0])):
        print(f"  {state}: {number} times")
    return 0


def _count(seeds: range) -> int:
    began, events, seconds = time.process_time(), 0, 0.0
    faults: Counter[str] = Counter()
    broken = 0
    for seed in seeds:
        try:
            outcome = run(seed)
        except Broken as error:
            broken += 1
            print(f"seed {seed}: {error}")
            continue
        events, seconds = events + outcome.num_events, seconds + outcome.seconds
        faults += outcome.faults
    elapsed_s = time.process_time() - began
    print(f"{len(seeds)} seeds, {broken} broken, {events} events, {elapsed_s:.1f} s of a core")
    print(f"{seconds:.0f} virtual seconds; {dict(faults)}")
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main())
