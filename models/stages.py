"""Which layers each stage of a pipeline has: whole groups of those that lie together in a page."""

from collections.abc import Sequence
from itertools import combinations, pairwise
from math import prod

from effuse.models.config import ModelConfig
from effuse.models.tensors import shard_of, tensors_of


def stage_groups(config: ModelConfig, num_groups: int, count: int) -> tuple[range, ...]:
    """The groups of layers of each stage: the cut whose largest stage reads the fewest weights.

    A stage's time is taken to follow the weights that a step reads, of its layers and of the head.
    Raises ValueError if there are fewer groups than stages.
    """
    if count > num_groups:
        each = config.num_layers // num_groups
        raise ValueError(
            f"--pipeline-parallel-size {count}: the model's pages have {num_groups} groups of "
            f"{each} layers, and a stage needs at least one"
        )
    costs = group_costs(config, num_groups)

    def largest(cut: Sequence[int]) -> list[int]:
        return sorted((sum(costs[a:b]) for a, b in pairwise(cut)), reverse=True)

    inner = combinations(range(1, num_groups), count - 1)
    best = min(((0, *at, num_groups) for at in inner), key=largest)
    return tuple(range(*pair) for pair in pairwise(best))


def group_costs(config: ModelConfig, num_groups: int) -> list[int]:
    """Values of weights that a step reads in each group of layers, with the head in the last one.
    A lookup in the embedding reads few."""
    each = config.num_layers // num_groups
    costs = []
    for first in range(0, config.num_layers, each):
        shard = shard_of(config, 0, 1, layers=range(first, first + each))
        tensors = tensors_of(config, shard)
        embedding = f"{config.family.layout.embedding}.weight"
        costs.append(sum(prod(one.held) for name, one in tensors.items() if name != embedding))
    if config.tie_embeddings:
        costs[-1] += config.vocab_size * config.hidden_size
    return costs
