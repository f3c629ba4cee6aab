"""What the operators run without a GPU: the chunk form in torch, and for gradients autograd through it.

Nothing is saved between the two. Shapes: as in ``operands``.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .chunk import chunk_scan
from .operands import Gradients, Saved, ScanOperands

CHUNK_SIZE = 64


def forward(operands: ScanOperands, *, scale: float, save: bool = False) -> tuple[Tensor, Tensor, None]:
    """Output in the dtype of q, final state in that of the states, and nothing saved."""
    output, state = chunk_scan(operands.cast(operands.state_dtype), scale=scale, chunk_size=CHUNK_SIZE)
    return output.to(operands.q.dtype).contiguous(), state.contiguous(), None


def backward(
    grad_output: Tensor,
    grad_final: Tensor | None,
    operands: ScanOperands,
    saved: Saved | None,
    *,
    scale: float,
    needs_decay_grad: bool,
) -> Gradients:
    """Gradients of every tensor, contiguous; that of log_decay is None unless asked for."""
    dtype, given = operands.state_dtype, operands._replace(initial_state=operands.start())
    with _recorded_by_autograd():
        leaves = given.map(lambda x: x.detach().to(dtype).requires_grad_() if x.is_floating_point() else x)
        results = chunk_scan(leaves, scale=scale, chunk_size=CHUNK_SIZE)
        upstream = [grad_output.to(dtype), torch.zeros_like(results[1]) if grad_final is None else grad_final]
        asked = [x for x in leaves.differentiable if x is not None]
        grads = iter(torch.autograd.grad(results, asked, upstream, allow_unused=True, materialize_grads=True))
    found: Any = (None if x is None else next(grads).to(x.dtype).contiguous() for x in given.differentiable)
    made = Gradients(*found)
    return made if needs_decay_grad else made._replace(log_decay=None)


def recurrent_forward(operands: ScanOperands, *, scale: float) -> tuple[Tensor, Tensor]:
    """The same numbers as ``forward``: no form of torch's own is faster for a few tokens."""
    return forward(operands, scale=scale)[:2]


@contextmanager
def _recorded_by_autograd() -> Iterator[None]:
    """Autograd inside an operator's kernel: under a dispatch mode, such as opcheck's, it is switched off there."""
    autograd = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradFunctionality)
    included = torch._C._dispatch_tls_local_include_set()
    excluded = torch._C._dispatch_tls_local_exclude_set() - autograd
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield
