"""Word problems and arithmetic: families of prompts whose answers are worked line by line.

Every line carries its state explicitly and needs one small operation: sums and differences of
numbers up to 9,999, products with one factor below 10 (or a round one), exact quotients.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from effuse.problems.frames import (
    COLOURS,
    COMPARE_FRAMES,
    EXPRESSION_FRAMES,
    LINKS,
    NAMES,
    ORDER_FRAMES,
    PRODUCT_FRAMES,
)
from effuse.problems.scenes import SCENES, Scene

LIMIT = 9_999
_STEP_COUNTS, _STEP_WEIGHTS = (2, 3, 4, 5, 6), (16, 24, 25, 19, 16)
_DIGIT_WEIGHTS = (14, 36, 30, 20)


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt with the lines of its worked answer, before the final line is added."""

    prompt: str
    lines: tuple[str, ...]
    result: str
    kind: str
    phrasing: str
    steps: int


@dataclass(slots=True)
class Ledger:
    """The worked lines so far and the value they have reached."""

    value: int = 0
    lines: list[str] = field(default_factory=list)

    def work(self, label: str, left: int, sign: str, right: int) -> int:
        """Write `label: left sign right = value` and hold the value."""
        operations: dict[str, Callable[[int, int], int]] = {
            "+": int.__add__,
            "-": int.__sub__,
            "*": int.__mul__,
            "/": int.__floordiv__,
        }
        self.value = operations[sign](left, right)
        prefix = f"{label}: " if label else ""
        self.lines.append(f"{prefix}{left} {sign} {right} = {self.value}")
        return self.value


def number(rng: random.Random, low: int, high: int) -> int:
    """A number in [low, high]: first its count of digits is drawn, then the number."""
    top = len(str(high))
    digits = rng.choices(range(1, top + 1), _DIGIT_WEIGHTS[:top])[0]
    first = max(low, 10 ** (digits - 1))
    last = min(high, 10**digits - 1)
    return rng.randint(first, last) if first <= last else rng.randint(low, high)


def sentence(text: str) -> str:
    """Capitalise and end with a question mark or a full stop."""
    asks = text.startswith(("how", "what", "by how"))
    return text[0].upper() + text[1:] + ("?" if asks else ".")


def chain(rng: random.Random) -> Task:
    """A story about one quantity: a beginning, then events that change it."""
    scene = rng.choice(SCENES)
    thing = rng.choice(scene.things)
    (name, pronoun), (other, _) = rng.sample(NAMES, 2)
    steps = rng.choices(_STEP_COUNTS, _STEP_WEIGHTS)[0]
    ledger = Ledger()
    words = {"A": name, "B": other, "s": pronoun, "o": thing}
    sentences = [_open(rng, scene, ledger, words)]
    while sum("=" in line for line in ledger.lines) < steps:
        sentences.append(_event(rng, scene, ledger, words))
    ask = rng.randrange(len(scene.asks))
    sentences.append(sentence(scene.asks[ask].format(**words)))
    return Task(
        prompt=" ".join(sentences),
        lines=tuple(ledger.lines),
        result=str(ledger.value),
        kind="story",
        phrasing=f"{scene.name}/{ask}",
        steps=steps,
    )


def _open(rng: random.Random, scene: Scene, ledger: Ledger, words: dict[str, str]) -> str:
    if rng.random() < 0.2:
        many, each = rng.randint(2, 9), rng.randint(2, 99)
        if rng.random() < 0.5 and each < 10:
            many, each = rng.randint(10, 99), many
        ledger.work("start", many, "*", each)
        return sentence(rng.choice(scene.packs).format(n=many, k=each, **words))
    ledger.value = number(rng, 2, LIMIT - 1000)
    ledger.lines.append(f"start: {ledger.value}")
    return sentence(rng.choice(scene.opens).format(n=ledger.value, **words))


def _event(rng: random.Random, scene: Scene, ledger: Ledger, words: dict[str, str]) -> str:
    sign, amount, forms = _operation(rng, scene, ledger.value)
    form = rng.choice(forms)
    label = form[form.index("_") + 1 :].split()[0].rstrip(",")
    if "{n}" in form:
        label += f" {amount}"
    ledger.work(label, ledger.value, sign, amount)
    text = form.replace("_", "").format(n=amount, **words)
    if rng.random() < 0.35:
        text = f"{rng.choice(LINKS)} {text}"
    return sentence(text)


def _operation(rng: random.Random, scene: Scene, value: int) -> tuple[str, int, tuple[str, ...]]:
    """The next sign, its right operand and the sentences for it; stays in 1..LIMIT."""
    kind = rng.choices(("gain", "loss", "double", "grow", "halve", "share"), (40, 34, 7, 6, 6, 7))
    factors = [f for f in range(3, 10) if value <= 99 or (value % 10 == 0 and value * f <= LIMIT)]
    divisors = [d for d in range(3, 10) if value % d == 0 and 1 < value // d <= 99]
    match kind[0]:
        case "double" if value * 2 <= LIMIT:
            return "*", 2, scene.doubles
        case "grow" if factors and value * 9 <= LIMIT:
            return "*", rng.choice(factors), scene.grows
        case "halve" if value % 2 == 0:
            return "/", 2, scene.halves
        case "share" if divisors:
            return "/", rng.choice(divisors), scene.shares
        case "loss" if value > 2:
            return "-", number(rng, min(2, value - 1), value - 1), scene.losses
        case _ if value < LIMIT - 1:
            return "+", number(rng, min(2, LIMIT - value), LIMIT - value), scene.gains
    return "-", number(rng, min(2, value - 1), value - 1), scene.losses


def compare(rng: random.Random) -> Task:
    """Several owners, each compared with the one before; asks for one, a difference or the sum."""
    frame = rng.randrange(len(COMPARE_FRAMES))
    owners = _owners(rng, COMPARE_FRAMES[frame].persons)
    thing = rng.choice(rng.choice(SCENES[:5]).things)
    ask = rng.choice(("last", "sum", "difference"))
    count = {"last": rng.randint(3, 5), "sum": rng.randint(2, 4), "difference": rng.randint(2, 5)}
    owners = owners[: count[ask]]
    ledger = Ledger()
    values = [number(rng, 2, 1_000)]
    sentences = [sentence(COMPARE_FRAMES[frame].first.format(A=owners[0], n=values[0], o=thing))]
    for before, owner in pairwise(owners):
        sign, amount, form = _relation(rng, frame, values[-1])
        text = form.format(A=owner, B=before, n=amount, o=thing)
        sentences.append(sentence(text))
        values.append(ledger.work(_label(owner), values[-1], sign, amount))
    question = _conclude(ask, frame, owners, values, ledger).format(o=thing)
    sentences.append(sentence(question))
    return Task(
        prompt=" ".join(sentences),
        lines=tuple(ledger.lines),
        result=str(ledger.value),
        kind="compare",
        phrasing=f"{COMPARE_FRAMES[frame].name}/{ask}",
        steps=len(ledger.lines),
    )


def _owners(rng: random.Random, persons: bool) -> list[str]:
    """Five names, or five things distinguished by their colour."""
    if persons:
        return [name for name, _ in rng.sample(NAMES, 5)]
    noun = rng.choice(("box", "bag", "jar", "room", "truck", "basket"))
    return [f"the {colour} {noun}" for colour in rng.sample(COLOURS, 5)]


def _label(owner: str) -> str:
    return owner.split()[1] if owner.startswith("the ") else owner


def _relation(rng: random.Random, frame: int, value: int) -> tuple[str, int, str]:
    forms = COMPARE_FRAMES[frame]
    kind = rng.choices(("more", "fewer", "twice", "times", "half"), (35, 30, 10, 15, 10))[0]
    match kind:
        case "twice" if value <= 1_500:
            return "*", 2, forms.twice
        case "times" if value <= 99:
            return "*", rng.randint(3, 9), forms.times
        case "half" if value % 2 == 0:
            return "/", 2, forms.half
        case "fewer" if value > 3:
            return "-", number(rng, 2, value - 1), forms.fewer
    return "+", number(rng, 2, 500), forms.more


def _conclude(ask: str, frame: int, owners: list[str], values: list[int], ledger: Ledger) -> str:
    """Work the last lines and return the question, with `{o}` still open."""
    forms = COMPARE_FRAMES[frame]
    if ask == "last":
        return forms.ask_last.replace("{A}", owners[-1])
    if ask == "sum":
        total = values[0]
        for value in values[1:]:
            total = ledger.work("sum", total, "+", value)
        return forms.ask_sum
    (low, less), (high, more) = sorted(zip(values[:: len(values) - 1], (0, -1), strict=True))
    ledger.work("difference", high, "-", low)
    return forms.ask_difference.replace("{A}", owners[more]).replace("{B}", owners[less])


def products(rng: random.Random) -> Task:
    """A sum of products (shopping, travel, work), and the rest of a whole."""
    index = rng.randrange(len(PRODUCT_FRAMES))
    frame = PRODUCT_FRAMES[index]
    parts = rng.sample(frame.parts, rng.choice((2, 2, 3)))
    name, pronoun = rng.choice(NAMES)
    ledger = Ledger()
    terms, total = [], 0
    for order, part in enumerate(parts):
        many, each = rng.randint(2, 9), rng.randint(2, 99)
        terms.append(f"{many} {frame.many} {each} {frame.each}".replace("{p}", part))
        value = ledger.work(part, many, "*", each)
        total = ledger.work("total", total, "+", value) if order else value
    listed = f"{', '.join(terms[:-1])} and {terms[-1]}"
    prompt = [sentence(f"{frame.lead} {listed}".format(A=name, s=pronoun))]
    ask = frame.ask
    if rng.random() < 0.5:
        whole = min(LIMIT, total + number(rng, 1, 2_000))
        ledger.work(frame.rest_label, whole, "-", total)
        prompt.append(sentence(frame.whole.format(n=whole, A=name, s=pronoun)))
        ask = frame.ask_rest
    prompt.append(sentence(ask.format(A=name, s=pronoun)))
    return Task(
        prompt=" ".join(prompt),
        lines=tuple(ledger.lines),
        result=str(ledger.value),
        kind="products",
        phrasing=f"{frame.name}/{ask == frame.ask}",
        steps=len(ledger.lines),
    )


def arithmetic(rng: random.Random) -> Task:
    """A bare calculation: orders in words, a chain, products before sums, or brackets."""
    steps = rng.choices(_STEP_COUNTS, _STEP_WEIGHTS)[0]
    ledger = Ledger()
    shape = rng.choice((_orders, _orders, _sum_chain, _sum_of_products, _brackets))
    prompt, phrasing = shape(rng, ledger, steps)
    return Task(
        prompt=prompt,
        lines=tuple(ledger.lines),
        result=str(ledger.value),
        kind="arithmetic",
        phrasing=phrasing,
        steps=len(ledger.lines),
    )


def _frame(rng: random.Random, expression: str) -> tuple[str, str]:
    index = rng.randrange(len(EXPRESSION_FRAMES))
    return EXPRESSION_FRAMES[index].format(e=expression), f"expression/{index}"


def _orders(rng: random.Random, ledger: Ledger, steps: int) -> tuple[str, str]:
    index = rng.randrange(len(ORDER_FRAMES))
    frame = ORDER_FRAMES[index]
    ledger.value = number(rng, 2, LIMIT - 1000)
    sentences = [sentence(frame.start.format(n=ledger.value))]
    scene = Scene("", (), (), (), (frame.add,), (frame.take,), ("double it",), (frame.times,),
                  ("halve it",), (frame.share,), ())  # fmt: skip
    for _ in range(steps):
        sign, amount, forms = _operation(rng, scene, ledger.value)
        sentences.append(sentence(forms[0].format(n=amount)))
        ledger.work("", ledger.value, sign, amount)
    return " ".join([*sentences, frame.ask]), f"orders/{index}"


def _sum_chain(rng: random.Random, ledger: Ledger, steps: int) -> tuple[str, str]:
    ledger.value = number(rng, 2, LIMIT - 1000)
    expression = str(ledger.value)
    for _ in range(steps):
        sign, amount = _plus_or_minus(rng, ledger.value)
        expression += f" {sign} {amount}"
        ledger.work("", ledger.value, sign, amount)
    return _frame(rng, expression)


def _sum_of_products(rng: random.Random, ledger: Ledger, steps: int) -> tuple[str, str]:
    """`a * b + c * d ...`: all products first, from the left, then the sums."""
    pairs = [(rng.randint(2, 99), rng.randint(2, 9)) for _ in range((min(steps, 5) + 1) // 2)]
    values = [ledger.work("", left, "*", right) for left, right in pairs]
    total = values[0]
    for value in values[1:]:
        total = ledger.work("", total, "+", value)
    expression = " + ".join(f"{left} * {right}" for left, right in pairs)
    if steps % 2 == 0 or len(pairs) == 1:
        sign, amount = _plus_or_minus(rng, total)
        expression += f" {sign} {amount}"
        ledger.work("", total, sign, amount)
    return _frame(rng, expression)


def _brackets(rng: random.Random, ledger: Ledger, steps: int) -> tuple[str, str]:
    """`(a + b) * c - d ...`."""
    left, right, factor = rng.randint(1, 60), rng.randint(1, 39), rng.randint(2, 9)
    ledger.work("", left, "+", right)
    ledger.work("", ledger.value, "*", factor)
    expression = f"({left} + {right}) * {factor}"
    for _ in range(steps - 2):
        sign, amount = _plus_or_minus(rng, ledger.value)
        expression += f" {sign} {amount}"
        ledger.work("", ledger.value, sign, amount)
    return _frame(rng, expression)


def _plus_or_minus(rng: random.Random, value: int) -> tuple[str, int]:
    if value > 2 and (rng.random() < 0.5 or value >= LIMIT - 1):
        return "-", number(rng, 1, value - 1)
    return "+", number(rng, 1, LIMIT - value)
