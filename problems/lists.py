"""List and string tasks: sort, reverse, count, copy and pick, on lists of up to twelve items."""

from __future__ import annotations

import random
import string
from itertools import accumulate

from effuse.problems.frames import COLOURS
from effuse.problems.scenes import SCENES
from effuse.problems.stories import Task, number

LONGEST = 12
_VOWELS = "aeiou"

_FORMS: dict[str, tuple[str, ...]] = {
    "sort": (
        "Sort {list} from small to large.",
        "Put these numbers in order, smallest first: {list}.",
        "Arrange the numbers {list} in rising order.",
    ),
    "sort_down": (
        "Sort {list} from large to small.",
        "Put these numbers in order, largest first: {list}.",
        "Arrange the numbers {list} in falling order.",
    ),
    "alphabet": (
        "Sort the letters {list} by the alphabet.",
        "Put these letters in alphabetical order: {list}.",
    ),
    "reverse": (
        "Reverse the list {list}.",
        "Write {list} backwards.",
        "Give these items from last to first: {list}.",
    ),
    "copy": (
        "Copy the list {list}.",
        "Repeat after me: {list}.",
        "Say exactly this: {list}.",
    ),
    "count": (
        "Count the {item} in {list}.",
        "How many {item} are in the list {list}?",
        "In the list {list}, how many {item} are there?",
    ),
    "largest": (
        "Which number is the largest: {list}?",
        "Find the maximum of {list}.",
    ),
    "smallest": (
        "Which number is the smallest: {list}?",
        "Find the minimum of {list}.",
    ),
}
_WEIGHTS = {
    "sort": 18,
    "sort_down": 12,
    "alphabet": 10,
    "reverse": 18,
    "copy": 12,
    "count": 22,
    "largest": 7,
    "smallest": 7,
}


def list_task(rng: random.Random) -> Task:
    """One list task; `lines` is empty except for counting, which has a running count."""
    name = rng.choices(list(_FORMS), [_WEIGHTS[form] for form in _FORMS])[0]
    form = rng.randrange(len(_FORMS[name]))
    items, item, lines, result = _solve(rng, name)
    prompt = _FORMS[name][form].format(list=", ".join(items), item=item)
    return Task(
        prompt=prompt,
        lines=lines,
        result=result,
        kind="list",
        phrasing=f"{name}/{form}",
        steps=len(items),
    )


def _solve(rng: random.Random, name: str) -> tuple[list[str], str, tuple[str, ...], str]:
    """The items, the counted item (counting only), the worked lines and the result."""
    size = rng.randint(3, LONGEST)
    match name:
        case "sort" | "sort_down":
            numbers = _distinct_numbers(rng, size)
            ordered = sorted(numbers, reverse=name == "sort_down")
            return [str(n) for n in numbers], "", (), ", ".join(map(str, ordered))
        case "largest" | "smallest":
            numbers = _distinct_numbers(rng, size)
            best = max(numbers) if name == "largest" else min(numbers)
            return [str(n) for n in numbers], "", (), str(best)
        case "alphabet":
            letters = rng.sample(string.ascii_lowercase, size)
            return letters, "", (), ", ".join(sorted(letters))
        case "count":
            return _count(rng, size)
    items = _items(rng, size)
    shown = items if name == "copy" else items[::-1]
    return items, "", (), ", ".join(shown)


def _distinct_numbers(rng: random.Random, size: int) -> list[int]:
    high = 99 if size > 6 or rng.random() < 0.6 else 999
    return rng.sample(range(1, high + 1), size)


def _count(rng: random.Random, size: int) -> tuple[list[str], str, tuple[str, ...], str]:
    """A running count of the items with a property that each item shows by itself."""
    item = rng.choice(("even numbers", "odd numbers", "vowels", "colours", "items"))
    match item:
        case "even numbers" | "odd numbers":
            items = _numbers(rng, size)
            found = [int(each) % 2 == (item == "odd numbers") for each in items]
        case "vowels":
            items = [rng.choice(rng.choice((_VOWELS, string.ascii_lowercase))) for _ in range(size)]
            found = [each in _VOWELS for each in items]
        case "colours":
            pool = rng.choice(SCENES).things
            items = [rng.choice(rng.choice((COLOURS, pool))) for _ in range(size)]
            found = [each in COLOURS for each in items]
        case _:
            items = _items(rng, size)
            found = [True] * size
    counts = list(accumulate(int(each) for each in found))
    line = ", ".join(f"{each} {count}" for each, count in zip(items, counts, strict=True))
    return items, item, (line,), str(counts[-1])


def _numbers(rng: random.Random, size: int) -> list[str]:
    return [str(number(rng, 1, 9_999)) for _ in range(size)]


def _items(rng: random.Random, size: int) -> list[str]:
    """Numbers, letters or words."""
    match rng.choice(("numbers", "letters", "words")):
        case "numbers":
            return _numbers(rng, size)
        case "letters":
            return rng.choices(string.ascii_lowercase, k=size)
    pool = COLOURS + rng.choice(SCENES).things
    return [rng.choice(pool) for _ in range(size)]
