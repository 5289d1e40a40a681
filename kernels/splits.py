"""How the cached tokens of a sequence are split over programs when there are too few of them.

A launch fixes the most splits there can be; every sequence is cut by its own lengths, on the
device (`splits_triton`), so that a captured launch suits whatever context its sequences have.
"""

# The most keys of any kernel's tile, and what a split's tokens are a multiple of.
SPLIT_STEP = 128


def most_splits(num_programs: int, wave: int, max_context: int) -> int:
    """Splits for each of ``num_programs`` programs without any, up to ``wave`` programs at once.

    A pure function of the launch shape: the same forward is always split the same way.
    """
    return max(1, min(wave // max(1, num_programs), -(-max_context // SPLIT_STEP)))
