"""The additive family in torch, behind the interface of ``additive_triton``: what the operators run without a GPU.

The chunk form, and for gradients autograd through it. Nothing is saved between the two.

Shapes: as in ``additive_operands``.
"""

from functools import partial

from torch import Tensor

from .additive_operands import AdditiveOperands
from .by_autograd import gradients_by_autograd
from .chunk import chunk_scan
from .normal_form import MicroSteps

CHUNK_SIZE = 64


def additive_forward(
    operands: AdditiveOperands, *, scale: float, save: bool = False
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Output in the dtype of q, final state in that of the states, and an empty list."""
    q, k, v, log_decay, initial_state, cu_seqlens = operands
    dtype = operands.state_dtype
    initial = operands.empty_state().zero_() if initial_state is None else initial_state.to(dtype)
    decay = None if log_decay is None else log_decay.to(dtype)
    output, final_state = _scan(
        q.to(dtype), k.to(dtype), v.to(dtype), initial, decay, cu_seqlens=cu_seqlens, scale=scale
    )
    return output.to(q.dtype).contiguous(), final_state.contiguous(), []


def additive_backward(
    grad_output: Tensor,
    grad_final: Tensor | None,
    operands: AdditiveOperands,
    saved: list[Tensor],
    *,
    scale: float,
    needs_decay_grad: bool,
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, log_decay (None unless wanted) and the initial state."""
    q, k, v, log_decay, initial_state, cu_seqlens = operands
    initial = operands.empty_state().zero_() if initial_state is None else initial_state
    scan, given = partial(_scan, cu_seqlens=cu_seqlens, scale=scale), (q, k, v, initial, log_decay)
    grads = gradients_by_autograd(scan, given, grad_output, grad_final, dtype=operands.state_dtype)
    dq, dk, dv, d_initial, d_log_decay = grads
    return dq, dk, dv, d_log_decay if needs_decay_grad else None, d_initial


def recurrent_forward(operands: AdditiveOperands, *, scale: float) -> tuple[Tensor, Tensor]:
    """The same numbers as ``additive_forward``: no form of torch's own is faster for a few tokens."""
    output, final_state, _ = additive_forward(operands, scale=scale)
    return output, final_state


def _scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    initial: Tensor,
    log_decay: Tensor | None,
    *,
    cu_seqlens: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    steps = MicroSteps(v.unsqueeze(2), None, k.unsqueeze(2), log_decay, reads_before_decay=False, blocks=1)
    return chunk_scan(q, steps, initial, scale=scale, chunk_size=CHUNK_SIZE, cu_seqlens=cu_seqlens)
