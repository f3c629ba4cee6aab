"""The delta family as operators of torch; see ``scan_operators``.

    S <- S Diag(e^{log_decay_t});   u_r = w_r v_r - r_r S a_r,   S <- S + u_r b_r^T   for each row r of token t;
    o_t = scale * S q_t, summed over the blocks of a head

    statemix::delta_scan            output, final state, and what backward needs besides the inputs
    statemix::delta_scan_backward   gradients of q, a, b, v, rate, weight, log_decay and the initial state
    statemix::delta_recurrent_scan  output and final state, one token after another, without gradients

On a GPU, and on the CPU under Triton's interpreter, they run the Triton kernels, which are imported then. Elsewhere on
the CPU they run the torch chunk form, so that they mean the same on every machine.

Shapes: as in ``delta_operands``; R rows, C chunk.
"""

from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from . import delta_torch
from .delta_operands import DeltaGradients, DeltaOperands, segments_of
from .launch_config import delta_config, device_arch
from .scan_operators import ScanOperators, has_kernels
from .spans import num_spans


def delta_scan(operands: DeltaOperands, *, scale: float, recompute: bool = False) -> tuple[Tensor, Tensor]:
    """Output [B, T, HO, V] in the dtype of q and final state [N, HV, V, K], with gradients to every tensor.

    Args:
        recompute: keep nothing for the backward pass, which then computes it once more.

    Raises:
        NotImplementedError: in a backward pass with create_graph=True; there is no second derivative.
    """
    return _OPERATORS.scan(operands, scale=scale, recompute=recompute)


def delta_recurrent_scan(operands: DeltaOperands, *, scale: float) -> tuple[Tensor, Tensor]:
    """``delta_scan`` one token after another: faster for a few tokens, and without gradients."""
    return _OPERATORS.recurrent_scan(operands, scale=scale)


def _forward(operands: DeltaOperands, *, scale: float, save: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
    result: tuple[Tensor, Tensor, list[Tensor]] = _kernels(operands).delta_forward(operands, scale=scale, save=save)
    return result


def _backward(
    grad_output: Tensor,
    grad_final: Tensor | None,
    operands: DeltaOperands,
    saved: list[Tensor],
    *,
    scale: float,
    needs_decay_grad: bool,
) -> DeltaGradients:
    grads: DeltaGradients = _kernels(operands).delta_backward(
        grad_output, grad_final, operands, saved, scale=scale, needs_decay_grad=needs_decay_grad
    )
    return grads


def _recurrent(operands: DeltaOperands, *, scale: float) -> tuple[Tensor, Tensor]:
    if not has_kernels(operands.q):
        return delta_torch.delta_recurrent_forward(operands, scale=scale)
    from .triton.recurrent import delta_recurrent_forward

    return delta_recurrent_forward(operands, scale=scale)


def _saved_like(operands: DeltaOperands) -> list[Tensor]:
    """Tensors of the shapes that ``delta_triton.delta_forward`` saves.

    R is divided, and compared with nothing, so no graph is tied to one length.
    """
    q, v, log_decay, cu_seqlens = operands.q, operands.v, operands.log_decay, operands.cu_seqlens
    (batch, num_rows, _, value_dim), num_heads, key_dim = v.shape, operands.num_heads, q.shape[-1]
    config = delta_config(device_arch(q.device), int(key_dim), int(value_dim), q.dtype)
    size, num_documents = config.chunk_size, None if cu_seqlens is None else cu_seqlens.shape[0] - 1
    num_chunks = num_spans(batch, num_rows, size, num_documents)
    keys = (batch, num_rows, num_heads, key_dim)
    num_segments, segment_length = segments_of(operands, config)
    saved = [
        q.new_empty(num_chunks, num_heads, key_dim, value_dim),  # states at chunk starts
        v.new_empty(batch, num_rows, num_heads, value_dim),  # u
        q.new_empty(num_segments, num_heads, key_dim, key_dim, dtype=torch.float32),  # their maps
        q.new_empty(segment_length, 0),
        q.new_empty(num_chunks, num_heads, size, size),  # pairs of rows
        q.new_empty(keys),
    ]
    if log_decay is None:
        return saved
    if log_decay.ndim == 3:
        return [*saved, q.new_empty(2, num_heads, batch * num_rows, dtype=torch.float32)]
    total = q.new_empty(num_chunks, num_heads, key_dim, dtype=torch.float32)
    return [*saved, q.new_empty(keys), q.new_empty(keys), total]


def _kernels(operands: DeltaOperands) -> ModuleType:
    return _triton_kernels() if has_kernels(operands.q) else delta_torch


@cache  # the import statement takes a microsecond each time
def _triton_kernels() -> ModuleType:
    from . import delta_triton

    return delta_triton


_OPERATORS = ScanOperators(
    name="delta_scan",
    recurrent_name="delta_recurrent_scan",
    operands=DeltaOperands,
    schema="Tensor q, Tensor? a, Tensor b, Tensor v, Tensor? rate, Tensor? weight, Tensor? log_decay,"
    " Tensor? initial_state, Tensor? cu_seqlens, bool reads_before_decay, int blocks",
    forward=_forward,
    backward=_backward,
    recurrent=_recurrent,
    saved_like=_saved_like,
)
_OPERATORS.register()
