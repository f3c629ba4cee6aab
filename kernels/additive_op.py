"""The additive family as operators of torch; see ``scan_operators``.

    S <- S Diag(e^{log_decay_t}) + v_t k_t^T        o_t = scale * S q_t

    statemix::additive_scan            output, final state, and what backward needs besides the inputs
    statemix::additive_scan_backward   gradients of q, k, v, log_decay and the initial state
    statemix::recurrent_scan           output and final state, one token after another, without gradients

On a GPU, and on the CPU under Triton's interpreter, they run the Triton kernels, which are imported then. Elsewhere on
the CPU they run the torch chunk form, so that they mean the same on every machine.

Shapes: as in ``additive_operands``.
"""

from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from . import additive_torch
from .additive_operands import AdditiveOperands
from .launch_config import additive_config, device_arch
from .scan_operators import ScanOperators, has_kernels
from .spans import num_spans


def additive_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    *,
    scale: float,
    recompute: bool = False,
) -> tuple[Tensor, Tensor]:
    """Output [B, T, HV, V] in the dtype of q and final state [N, HV, V, K], with gradients to every tensor.

    Args:
        recompute: keep no states for the backward pass, which then walks once more.

    Raises:
        NotImplementedError: in a backward pass with create_graph=True; there is no second derivative.
    """
    operands = AdditiveOperands(q, k, v, log_decay, initial_state, cu_seqlens)
    return _OPERATORS.scan(operands, scale=scale, recompute=recompute)


def recurrent_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    *,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """``additive_scan`` one token after another: faster for a few tokens, and without gradients."""
    return _OPERATORS.recurrent_scan(AdditiveOperands(q, k, v, log_decay, initial_state, cu_seqlens), scale=scale)


def _forward(operands: AdditiveOperands, *, scale: float, save: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
    result: tuple[Tensor, Tensor, list[Tensor]] = _kernels(operands).additive_forward(operands, scale=scale, save=save)
    return result


def _backward(
    grad_output: Tensor,
    grad_final: Tensor | None,
    operands: AdditiveOperands,
    saved: list[Tensor],
    *,
    scale: float,
    needs_decay_grad: bool,
) -> tuple[Tensor | None, ...]:
    dq, dk, dv, d_log_decay, d_initial = _kernels(operands).additive_backward(
        grad_output, grad_final, operands, saved, scale=scale, needs_decay_grad=needs_decay_grad
    )
    if operands.log_decay is not None and d_log_decay is not None:
        dtype = operands.log_decay.dtype
        d_log_decay = d_log_decay.to(dtype, memory_format=torch.contiguous_format).contiguous()
    return dq, dk, dv, d_log_decay, d_initial


def _recurrent(operands: AdditiveOperands, *, scale: float) -> tuple[Tensor, Tensor]:
    if not has_kernels(operands.q):
        return additive_torch.recurrent_forward(operands, scale=scale)
    from .triton.recurrent import recurrent_forward

    return recurrent_forward(operands, scale=scale)


def _saved_like(operands: AdditiveOperands) -> list[Tensor]:
    """Tensors of the shapes that ``additive_triton.additive_forward`` saves.

    T is divided, and compared with nothing, so no graph is tied to one T.
    """
    q, _, v, log_decay, _, cu_seqlens = operands
    (batch, seq_len, num_heads, value_dim), key_dim = v.shape, q.shape[-1]
    size = additive_config(device_arch(q.device), int(key_dim), int(value_dim), q.dtype).chunk_size
    num_chunks = num_spans(batch, seq_len, size, None if cu_seqlens is None else cu_seqlens.shape[0] - 1)
    states = v.new_empty(num_chunks, num_heads, key_dim, value_dim)
    if log_decay is None or log_decay.ndim == 1:
        return [states]
    if log_decay.ndim == 3:
        return [states, q.new_empty(2, num_heads, batch * seq_len, dtype=torch.float32)]
    reach, rest = (q.new_empty(batch, seq_len, num_heads, key_dim) for _ in range(2))
    total = q.new_empty(num_chunks, num_heads, key_dim, dtype=torch.float32)
    return [states, reach, rest, total, q.new_empty(num_chunks, num_heads, size, size)]


def _kernels(operands: AdditiveOperands) -> ModuleType:
    return _triton_kernels() if has_kernels(operands.q) else additive_torch


@cache  # the import statement takes a microsecond each time
def _triton_kernels() -> ModuleType:
    from . import additive_triton

    return additive_triton


_OPERATORS = ScanOperators(
    name="additive_scan",
    recurrent_name="recurrent_scan",
    operands=AdditiveOperands,
    schema="Tensor q, Tensor k, Tensor v, Tensor? log_decay, Tensor? initial_state, Tensor? cu_seqlens",
    forward=_forward,
    backward=_backward,
    recurrent=_recurrent,
    saved_like=_saved_like,
)
_OPERATORS.register()
