"""The optimiser of the bundled model: Muon for matrices inside layers, Adam for the rest.

Muon (Jordan et al., 2024) steps along the orthogonalised momentum of each matrix. Matrices of one
shape are handled as one stack, so a step costs a few dozen kernels whatever the depth.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


@dataclass(frozen=True, slots=True)
class Rates:
    """Peak learning rates and the constants of both rules."""

    matrix: float = 1e-2
    other: float = 5e-3
    momentum: float = 0.95
    weight_decay: float = 0.02
    betas: tuple[float, float] = (0.9, 0.98)


def orthogonalise(stack: Tensor, iterations: int = 5) -> Tensor:
    """Move the singular values of every matrix in [count, rows, columns] close to 1."""
    a, b, c = _COEFFICIENTS
    x: Tensor = stack.bfloat16() if stack.is_cuda else stack
    tall = x.shape[1] > x.shape[2]
    x = x.transpose(1, 2) if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(iterations):
        gram = x @ x.transpose(1, 2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.transpose(1, 2) if tall else x).to(stack.dtype)


class Optimizer:
    """Updates named parameters in place; its state is a flat dict of tensors."""

    def __init__(self, parameters: Mapping[str, Tensor], rates: Rates) -> None:
        """Matrices of layers go to Muon, everything else to Adam."""
        self._rates = rates
        self._stacks: dict[tuple[int, ...], list[str]] = defaultdict(list)
        for name, parameter in parameters.items():
            if ".layers." in name and parameter.ndim == 2:
                self._stacks[tuple(parameter.shape)].append(name)
        self._parameters = parameters
        matrices = {name for names in self._stacks.values() for name in names}
        self._rest = [name for name in parameters if name not in matrices]
        self.state: dict[str, Tensor] = {
            f"momentum.{name}": torch.zeros_like(value.data) for name, value in parameters.items()
        }
        for name in self._rest:
            self.state[f"variance.{name}"] = torch.zeros_like(parameters[name].data)

    @torch.no_grad()
    def step(self, number: int, scale: float) -> None:
        """Apply the gradients as step `number` (from 1), learning rates times `scale`."""
        for names in self._stacks.values():
            self._step_matrices(names, scale)
        self._step_rest(number, scale)

    def _step_matrices(self, names: list[str], scale: float) -> None:
        rates = self._rates
        weights = [self._parameters[name] for name in names]
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        momenta = [self.state[f"momentum.{name}"] for name in names]
        torch._foreach_lerp_(momenta, gradients, 1 - rates.momentum)
        ahead = torch._foreach_lerp(gradients, momenta, rates.momentum)
        updates = orthogonalise(torch.stack(list(ahead)))
        rate = rates.matrix * scale
        rows, columns = weights[0].shape
        torch._foreach_mul_(weights, 1 - rate * rates.weight_decay)
        torch._foreach_add_(
            weights, list(updates.unbind()), alpha=-rate * 0.2 * max(rows, columns) ** 0.5
        )

    def _step_rest(self, number: int, scale: float) -> None:
        first, second = self._rates.betas
        weights = [self._parameters[name] for name in self._rest]
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        means = [self.state[f"momentum.{name}"] for name in self._rest]
        variances = [self.state[f"variance.{name}"] for name in self._rest]
        torch._foreach_lerp_(means, gradients, 1 - first)
        torch._foreach_lerp_(variances, torch._foreach_mul(gradients, gradients), 1 - second)
        roots = torch._foreach_sqrt(torch._foreach_div(variances, 1 - second**number))
        torch._foreach_add_(roots, 1e-8)
        updates = torch._foreach_div(means, roots)
        factor = -self._rates.other * scale / (1 - first**number)
        torch._foreach_add_(weights, updates, alpha=factor)
