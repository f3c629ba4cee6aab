"""The additive family in torch, behind the interface of ``additive_triton``: what the operators run without a GPU.

The chunk form, and for gradients autograd through it. Nothing is saved between the two.

Shapes: as in ``additive_op``.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from .chunk import chunk_scan
from .normal_form import MicroSteps

CHUNK_SIZE = 64


def additive_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    *,
    scale: float,
    save: bool = False,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Output in the dtype of q, final state in that of the states, and an empty list."""
    dtype = _state_dtype(q)
    output, final_state = _scan(
        q.to(dtype),
        k.to(dtype),
        v.to(dtype),
        None if log_decay is None else log_decay.to(dtype),
        None if initial_state is None else initial_state.to(dtype),
        cu_seqlens,
        scale=scale,
    )
    return output.to(q.dtype).contiguous(), final_state.contiguous(), []


def additive_backward(
    grad_output: Tensor,
    grad_final: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    saved: list[Tensor],
    *,
    scale: float,
    needs_decay_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """Gradients of q, k, v, log_decay (None unless wanted) and the initial state."""
    initial = _zeros(q, v, cu_seqlens) if initial_state is None else initial_state
    given = [q, k, v, initial] if log_decay is None else [q, k, v, initial, log_decay]
    with _recorded_by_autograd():
        leaves = [x.detach().to(_state_dtype(q)).requires_grad_() for x in given]
        decay = None if log_decay is None else leaves[4]
        results = _scan(leaves[0], leaves[1], leaves[2], decay, leaves[3], cu_seqlens, scale=scale)
        upstream = [grad_output.to(_state_dtype(q)), torch.zeros_like(results[1]) if grad_final is None else grad_final]
        found = torch.autograd.grad(results, leaves, upstream, allow_unused=True, materialize_grads=True)
    dq, dk, dv, d_initial, *rest = (grad.to(x.dtype).contiguous() for grad, x in zip(found, given, strict=True))
    return dq, dk, dv, rest[0] if rest and needs_decay_grad else None, d_initial


def recurrent_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    *,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The same numbers as ``additive_forward``: no form of torch's own is faster for a few tokens."""
    output, final_state, _ = additive_forward(q, k, v, log_decay, initial_state, cu_seqlens, scale=scale)
    return output, final_state


def _zeros(q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    num_states = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return q.new_zeros(num_states, *v.shape[-2:], q.shape[-1], dtype=_state_dtype(q))


@contextmanager
def _recorded_by_autograd() -> Iterator[None]:
    """Autograd inside an operator's kernel: under a dispatch mode, such as opcheck's, it is switched off there."""
    autograd = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradFunctionality)
    included = torch._C._dispatch_tls_local_include_set()
    excluded = torch._C._dispatch_tls_local_exclude_set() - autograd
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield


def _state_dtype(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)


def _scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    *,
    scale: float,
) -> tuple[Tensor, Tensor]:
    initial_state = _zeros(q, v, cu_seqlens) if initial_state is None else initial_state
    steps = MicroSteps(v.unsqueeze(2), None, k.unsqueeze(2), log_decay, reads_before_decay=False, blocks=1)
    return chunk_scan(q, steps, initial_state, scale=scale, chunk_size=CHUNK_SIZE, cu_seqlens=cu_seqlens)
