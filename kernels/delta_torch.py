"""The delta family in torch, behind the interface of ``delta_triton``: what the operators run without a GPU.

The chunk form, and for gradients autograd through it. Nothing is saved between the two.

Shapes: as in ``delta_operands``.
"""

from torch import Tensor

from .by_autograd import gradients_by_autograd
from .chunk import chunk_scan
from .delta_operands import DeltaGradients, DeltaOperands
from .normal_form import MicroSteps, expand_heads

CHUNK_SIZE = 64


def delta_forward(operands: DeltaOperands, *, scale: float, save: bool = False) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Output in the dtype of q, final state in that of the states, and an empty list."""
    output, final_state = _scan(operands.cast(operands.state_dtype), scale=scale)
    return output.to(operands.q.dtype).contiguous(), final_state.contiguous(), []


def delta_backward(
    grad_output: Tensor,
    grad_final: Tensor | None,
    operands: DeltaOperands,
    saved: list[Tensor],
    *,
    scale: float,
    needs_decay_grad: bool,
) -> DeltaGradients:
    """Gradients of every tensor; that of log_decay is None unless wanted."""
    *tensors, cu_seqlens, reads_before_decay, blocks = operands
    tensors[-1] = _initial_state(operands)

    def scan(*tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        return _scan(DeltaOperands._make([*tensors, cu_seqlens, reads_before_decay, blocks]), scale=scale)

    found = gradients_by_autograd(scan, tensors, grad_output, grad_final, dtype=operands.state_dtype)
    grads = DeltaGradients._make(found)
    return grads if needs_decay_grad else grads._replace(log_decay=None)


def delta_recurrent_forward(operands: DeltaOperands, *, scale: float) -> tuple[Tensor, Tensor]:
    """The same numbers as ``delta_forward``: no form of torch's own is faster for a few tokens."""
    output, final_state, _ = delta_forward(operands, scale=scale)
    return output, final_state


def _initial_state(operands: DeltaOperands) -> Tensor:
    return operands.empty_state().zero_() if operands.initial_state is None else operands.initial_state


def _scan(operands: DeltaOperands, *, scale: float) -> tuple[Tensor, Tensor]:
    """Output and final state of operands of the dtype to compute in."""
    q, a, b, v, rate, weight, log_decay, _, cu_seqlens, reads_before_decay, blocks = operands
    read, value = b if a is None else a, expand_heads(v, operands.num_heads, dim=2)
    if rate is not None:
        read = rate.unsqueeze(-1) * expand_heads(read, operands.num_heads, dim=2)
    if weight is not None:
        value = weight.unsqueeze(-1) * value
    value, read, key = (x.unflatten(1, (-1, operands.num_steps)) for x in (value, read, b))
    steps = MicroSteps(value, read, key, log_decay, reads_before_decay=reads_before_decay, blocks=1)
    output, final_state = chunk_scan(
        q, steps, _initial_state(operands), scale=scale, chunk_size=CHUNK_SIZE, cu_seqlens=cu_seqlens
    )
    return output if blocks == 1 else output.unflatten(2, (-1, blocks)).sum(3), final_state
