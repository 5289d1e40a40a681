"""The gated activation of Llama-type MLPs: silu(gate) * up, over one fused projection."""

from torch import Tensor
from torch.nn import functional


def swiglu(gate_up: Tensor) -> Tensor:
    """``gate_up`` [T, 2I] holds the gate, then the up projection; returns [T, I] in its dtype."""
    if gate_up.is_cuda:
        from effuse.kernels import swiglu_triton

        return swiglu_triton.launch(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


def swiglu_ref(gate_up: Tensor) -> Tensor:
    """`swiglu` as its definition reads (Shazeer, 2020)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gate / (1 + (-gate).exp()) * up
