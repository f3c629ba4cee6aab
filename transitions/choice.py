"""Which form runs a scan, on which backend, and why.

Triton's kernels cover every transition with a normal form: the chunk form with gradients, and the recurrent form for a
few tokens without. On a GPU they are taken wherever they can be; an explicit choice runs or raises. Nothing here reads
a tensor's values.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from statemix.kernels import NormalForm, device_obstacle, needs_gradient, num_micro_steps, size_obstacle

from .inputs import ScanInputs

Form = Literal["auto", "recurrent", "chunk", "parallel"]
Backend = Literal["auto", "torch", "triton"]

SHORTEST_CHUNKED = 9  # tokens; below, the loop through ``apply`` takes less time than setting up a chunk
SHORTEST_CHUNKED_TRITON = 32  # tokens; below, a chunk's matrix products are mostly padding


class Explanation(NamedTuple):
    """What ``scan`` runs for some inputs, and why this form and this backend."""

    form: Literal["recurrent", "chunk", "parallel"]
    backend: Literal["torch", "triton"]
    reason: str
    backend_reason: str


class Choice(NamedTuple):
    """An explanation, and the normal form that the Triton kernels run; None for torch."""

    explanation: Explanation
    lowered: NormalForm | None = None


def choose(inputs: ScanInputs, form: Form, backend: Backend, device: torch.device) -> Choice:
    """What runs ``inputs`` if they are on ``device``.

    Raises:
        ValueError: an unknown form or backend.
        NotImplementedError: an explicit choice that cannot run.
    """
    if backend not in ("auto", "torch", "triton"):
        raise ValueError(f"backend: expected 'auto', 'torch' or 'triton', got {backend!r}")
    if form not in ("auto", "recurrent", "chunk", "parallel"):
        raise ValueError(f"form: expected 'auto', 'recurrent', 'chunk' or 'parallel', got {form!r}")
    if backend == "torch":
        return Choice(_torch(inputs, form, "asked for"))
    if backend == "auto" and device.type != "cuda":
        return Choice(_torch(inputs, form, f"the tensors are on {_name(device)}"))
    lowered = _lowered_or_obstacle(inputs, form, device)
    if isinstance(lowered, NormalForm):
        backend_reason = "asked for" if backend == "triton" else "the tensors are on a GPU"
        return Choice(_triton(inputs, form, lowered, backend_reason), lowered)
    if backend == "triton":
        raise NotImplementedError(f"backend: 'triton' cannot run, {lowered}; use 'torch' or 'auto'")
    return Choice(_torch(inputs, form, f"not triton: {lowered}"))


def _lowered_or_obstacle(inputs: ScanInputs, form: Form, device: torch.device) -> NormalForm | str:
    """What the Triton kernels run on ``device``, or why they cannot. Lowering may cost a kernel: it is done once."""
    if form == "parallel":
        return "the parallel form is written in torch only"
    obstacle = device_obstacle(device)
    if obstacle is not None:
        return obstacle
    if form == "recurrent" and _needs_gradient(inputs):
        return "its recurrent form has no gradients"
    if not torch.compiler.is_compiling() and _is_transformed():
        return "forward-mode and functorch derivatives are those of torch"
    try:
        lowered = inputs.transition.lower_factored()
        num_micro_steps(lowered, inputs.k)
    except NotImplementedError as error:
        return str(error)
    blocks = 1 if lowered.erase is None else lowered.blocks  # blocks that erase run as heads
    return size_obstacle(inputs.q.dtype, inputs.key_dim // blocks, inputs.v.shape[-1]) or lowered


def _triton(inputs: ScanInputs, form: Form, lowered: NormalForm, backend_reason: str) -> Explanation:
    if form == "recurrent" or form == "chunk":
        return Explanation(form, "triton", "asked for", backend_reason)
    if inputs.seq_len < SHORTEST_CHUNKED_TRITON and not _needs_gradient(inputs):
        reason = f"{inputs.seq_len} tokens are fewer than {SHORTEST_CHUNKED_TRITON}, without gradients"
        return Explanation("recurrent", "triton", reason, backend_reason)
    return Explanation("chunk", "triton", _direction(lowered, inputs.k), backend_reason)


def _torch(inputs: ScanInputs, form: Form, backend_reason: str) -> Explanation:
    if form == "recurrent":
        return Explanation("recurrent", "torch", "asked for", backend_reason)
    try:
        lowered = inputs.transition.lower()
        num_micro_steps(lowered, inputs.k)
    except NotImplementedError as error:
        if form != "auto":
            raise
        return Explanation("recurrent", "torch", f"no chunk form: {error}", backend_reason)
    if form == "chunk" or form == "parallel":
        return Explanation(form, "torch", "asked for", backend_reason)
    if inputs.seq_len < SHORTEST_CHUNKED:
        reason = f"{inputs.seq_len} tokens are fewer than {SHORTEST_CHUNKED}"
        return Explanation("recurrent", "torch", reason, backend_reason)
    return Explanation("chunk", "torch", _direction(lowered, inputs.k), backend_reason)


def _direction(lowered: NormalForm, k: Tensor) -> str:
    if lowered.erase is None:
        return "no erasure"
    return "erases along the write key" if lowered.erase[1] is k else "erases along a direction of its own, then writes"


def _needs_gradient(inputs: ScanInputs) -> bool:
    fields = (x for _, x, _ in inputs.transition.tensors())
    return needs_gradient((inputs.q, inputs.k, inputs.v, inputs.write, inputs.initial, *fields))


def _is_transformed() -> bool:
    """Inside ``torch.func`` or a forward-mode level, of which the operators know nothing."""
    return torch.autograd.forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None


def _name(device: torch.device) -> str:
    return "the CPU" if device.type == "cpu" else device.type
