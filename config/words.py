"""Numbers and counts in sentences for people."""

import math


def plain(value: float) -> str:
    """A number with three digits, as people write it: 44,300 and 0.00012."""
    if not math.isfinite(value):
        return str(value)
    shown = float(f"{value:.3g}")
    if abs(shown) >= 100 or not shown:
        return f"{shown:,.0f}"
    decimals = 2 - math.floor(math.log10(abs(shown)))
    return f"{shown:.{decimals}f}".rstrip("0").rstrip(".")


def counted(number: int, noun: str) -> str:
    """Such as "1 worker" and "2 workers"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def split_of(prefill: int, decode: int) -> str:
    """Such as "2 prefill and 3 decode workers"."""
    if 1 in (prefill, decode):
        return f"{counted(prefill, 'prefill worker')} and {counted(decode, 'decode worker')}"
    return f"{prefill} prefill and {decode} decode workers"
