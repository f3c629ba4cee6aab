"""A backward pass by autograd through the forward pass: what the kernels' stand-ins in torch do for gradients."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


def gradients_by_autograd(
    scan: Callable[..., tuple[Tensor, Tensor]],
    given: Sequence[Tensor | None],
    grad_output: Tensor,
    grad_final: Tensor | None,
    *,
    dtype: torch.dtype,
) -> list[Tensor | None]:
    """Gradients of ``given``, each in the dtype of its own and contiguous, None for None.

    Args:
        scan: output and final state of ``given`` in ``dtype``.
        grad_final: None for zeros.
    """
    with _recorded_by_autograd():
        cast = [None if x is None else x.detach().to(dtype).requires_grad_() for x in given]
        results = scan(*cast)
        upstream = [grad_output.to(dtype), torch.zeros_like(results[1]) if grad_final is None else grad_final]
        leaves = [x for x in cast if x is not None]
        found = iter(torch.autograd.grad(results, leaves, upstream, allow_unused=True, materialize_grads=True))
    return [None if x is None else next(found).to(x.dtype).contiguous() for x in given]


@contextmanager
def _recorded_by_autograd() -> Iterator[None]:
    """Autograd inside an operator's kernel: under a dispatch mode, such as opcheck's, it is switched off there."""
    autograd = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradFunctionality)
    included = torch._C._dispatch_tls_local_include_set()
    excluded = torch._C._dispatch_tls_local_exclude_set() - autograd
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield
