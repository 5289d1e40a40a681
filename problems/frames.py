"""Names and the frames of problems that are not stories: comparisons, sums of products, orders.

Data only; `stories.py` turns it into prompts and worked answers. `{n}` is the number,
`{o}` the things, `{A}` and `{B}` two owners or names, `{s}` the pronoun of A.
"""

from __future__ import annotations

from dataclasses import dataclass


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_WOMEN = _words(
    "Mia Anna Lena Sara Emma Ella Nora Ruth Lucy Alice Clara Julia Maria Sofia Zoe Eva "
    "Ida Rosa Hana Leila Amina Yuki Priya Grace"
)
_MEN = _words(
    "Tom Ben Max Leo Paul Peter Jack Noah Omar Ali Ivan Carlos David Felix Hugo Jonas "
    "Karl Luis Marco Oscar Sam Theo Victor Ravi"
)
NAMES: tuple[tuple[str, str], ...] = (
    *((name, "she") for name in _WOMEN),
    *((name, "he") for name in _MEN),
)

LINKS: tuple[str, ...] = (
    "then",
    "later",
    "next",
    "after that",
    "the next day",
    "on Monday",
    "on Friday",
    "in the evening",
    "a week later",
    "after lunch",
)


@dataclass(frozen=True, slots=True)
class CompareFrame:
    """How owners are related: `{A}` is described, mostly in terms of `{B}`."""

    name: str
    persons: bool
    first: str
    more: str
    fewer: str
    twice: str
    times: str
    half: str
    ask_last: str
    ask_sum: str
    ask_difference: str


COLOURS: tuple[str, ...] = _words("red blue green yellow white black brown grey pink purple")

COMPARE_FRAMES: tuple[CompareFrame, ...] = (
    CompareFrame(
        name="has",
        persons=True,
        first="{A} has {n} {o}",
        more="{A} has {n} more than {B}",
        fewer="{A} has {n} fewer than {B}",
        twice="{A} has twice as many as {B}",
        times="{A} has {n} times as many as {B}",
        half="{A} has half as many as {B}",
        ask_last="how many {o} does {A} have",
        ask_sum="how many {o} are there altogether",
        ask_difference="how many more {o} does {A} have than {B}",
    ),
    CompareFrame(
        name="with",
        persons=True,
        first="there are {n} {o} with {A}",
        more="with {A} there are {n} more than with {B}",
        fewer="with {A} there are {n} less than with {B}",
        twice="with {A} there are double as many as with {B}",
        times="with {A} there are {n} times as many as with {B}",
        half="with {A} there are half as many as with {B}",
        ask_last="what is the number of {o} with {A}",
        ask_sum="how many {o} is that in total",
        ask_difference="what is the difference in {o} between {A} and {B}",
    ),
    CompareFrame(
        name="contains",
        persons=False,
        first="{A} contains {n} {o}",
        more="in {A} there are {n} more than in {B}",
        fewer="in {A} there are {n} fewer than in {B}",
        twice="{A} contains twice as many as {B}",
        times="{A} contains {n} times as many as {B}",
        half="{A} contains half as many as {B}",
        ask_last="how many {o} are in {A}",
        ask_sum="what is the total number of {o}",
        ask_difference="how many {o} more are in {A} than in {B}",
    ),
    CompareFrame(
        name="holds",
        persons=False,
        first="{A} holds {n} {o}",
        more="{A} holds as many as {B} and {n} extra",
        fewer="{A} holds as many as {B} but {n} are missing",
        twice="{A} holds two times the number of {B}",
        times="{A} holds {n} times the number of {B}",
        half="{A} holds half the number of {B}",
        ask_last="find how many {o} {A} holds",
        ask_sum="add up all the {o}",
        ask_difference="by how many {o} is {A} ahead of {B}",
    ),
)


@dataclass(frozen=True, slots=True)
class ProductFrame:
    """A sum of products: `many` counts of part `{p}` with `each` to every one."""

    name: str
    lead: str
    parts: tuple[str, ...]
    many: str
    each: str
    ask: str
    whole: str
    rest_label: str
    ask_rest: str


PRODUCT_FRAMES: tuple[ProductFrame, ...] = (
    ProductFrame(
        name="shopping",
        lead="{A} buys",
        parts=_words("pens rulers notebooks balls hats scarves candles brushes"),
        many="{p} for",
        each="coins each",
        ask="how much does {s} pay",
        whole="{s} has {n} coins",
        rest_label="change",
        ask_rest="how many coins does {s} keep",
    ),
    ProductFrame(
        name="market",
        lead="at the market {A} sells",
        parts=_words("cabbages fish cheeses chickens sausages jugs"),
        many="{p} at",
        each="euros a piece",
        ask="how much money does {s} take in",
        whole="{s} hopes to earn {n} euros",
        rest_label="missing",
        ask_rest="how many euros are still missing",
    ),
    ProductFrame(
        name="travel",
        lead="{A} travels",
        parts=("walking", "cycling", "driving", "sailing", "riding", "skating"),
        many="hours {p} at",
        each="km an hour",
        ask="how far does {s} travel",
        whole="the whole way is {n} km",
        rest_label="rest",
        ask_rest="how many km are still to go",
    ),
    ProductFrame(
        name="work",
        lead="{A} works",
        parts=("Tuesday", "Wednesday", "Thursday", "Saturday", "Sunday"),
        many="hours on {p} and paints",
        each="fences an hour",
        ask="how many fences are painted in total",
        whole="there are {n} fences",
        rest_label="rest",
        ask_rest="how many fences are not painted",
    ),
    ProductFrame(
        name="school",
        lead="a school orders for its classes",
        parts=("paper", "chalk", "paint", "glue", "string", "wood"),
        many="packets of {p} with",
        each="grams each",
        ask="how many grams is the order",
        whole="the van can carry {n} grams",
        rest_label="free",
        ask_rest="how many grams could be added",
    ),
)


@dataclass(frozen=True, slots=True)
class OrderFrame:
    """Orders to a calculator, one in each sentence."""

    start: str
    add: str
    take: str
    times: str
    share: str
    ask: str


ORDER_FRAMES: tuple[OrderFrame, ...] = (
    OrderFrame(
        "start with {n}",
        "add {n}",
        "subtract {n}",
        "multiply by {n}",
        "divide by {n}",
        "What is the result?",
    ),
    OrderFrame(
        "think of the number {n}",
        "increase it by {n}",
        "decrease it by {n}",
        "make it {n} times as large",
        "take one of {n} equal parts",
        "Which number is it now?",
    ),
    OrderFrame(
        "take {n}", "plus {n}", "minus {n}", "times {n}", "divided by {n}", "What do you get?"
    ),
    OrderFrame(
        "write down {n}",
        "raise it by {n}",
        "lower it by {n}",
        "multiply it with {n}",
        "share it by {n}",
        "Give the last number.",
    ),
)

EXPRESSION_FRAMES: tuple[str, ...] = (
    "Compute {e}.",
    "Work out {e}.",
    "What is {e}?",
    "Calculate {e}.",
    "Find the value of {e}.",
    "Evaluate {e} step by step.",
    "Solve {e} and show your work.",
    "How much is {e}?",
)
