"""Which form runs a scan, on which backend, and why.

Triton's kernels cover every transition with a normal form: the chunk form with gradients, and the recurrent form for a
few tokens without. On a GPU they are taken wherever they can be; an explicit choice runs or raises. Nothing here reads
a tensor's values, except on the CPU to find out that a direction is a copy of the write key.
"""

from typing import Literal, NamedTuple

import torch

from statemix.kernels import (
    ScanOperands,
    backend_named,
    device_obstacle,
    is_transformed,
    needs_gradient,
    num_micro_steps,
    scan_operands,
    size_obstacle,
)

from .inputs import ScanInputs, copied_key

Form = Literal["auto", "recurrent", "chunk", "parallel"]

SHORTEST_CHUNKED = 9  # tokens; below, the loop through ``apply`` takes less time than setting up a chunk
SHORTEST_CHUNKED_TRITON = 32  # tokens; below, a chunk's matrix products are mostly padding


class Explanation(NamedTuple):
    """What ``scan`` runs for some inputs, and why this form and this backend."""

    form: Literal["recurrent", "chunk", "parallel"]
    backend: str
    reason: str
    backend_reason: str


class Choice(NamedTuple):
    """An explanation, and the operands that kernels run; None for torch, which makes them in the dtype of the state."""

    explanation: Explanation
    operands: ScanOperands | None = None


def choose(inputs: ScanInputs, form: Form, backend: str, device: torch.device) -> Choice:
    """What runs ``inputs`` if they are on ``device``.

    Raises:
        ValueError: an unknown form or backend.
        NotImplementedError: an explicit choice that cannot run.
    """
    if form not in ("auto", "recurrent", "chunk", "parallel"):
        raise ValueError(f"form: expected 'auto', 'recurrent', 'chunk' or 'parallel', got {form!r}")
    if backend == "torch":
        return Choice(_torch(inputs, form, "asked for"))
    if backend == "auto" and device.type != "cuda":
        return Choice(_torch(inputs, form, f"the tensors are on {_name(device)}"))
    is_triton = backend in ("auto", "triton")
    operands = _operands_or_obstacle(inputs, form, device) if is_triton else _registered(inputs, form, backend)
    if isinstance(operands, str):
        if backend != "auto":
            raise NotImplementedError(f"backend: {backend!r} cannot run, {operands}; use 'torch' or 'auto'")
        return Choice(_torch(inputs, form, f"not triton: {operands}"))
    if not is_triton:
        direction = _direction(inputs, operands.erases, operands.num_steps)
        return Choice(Explanation("chunk", backend, direction, "asked for"), operands)
    backend_reason = "the tensors are on a GPU" if backend == "auto" else "asked for"
    return Choice(_triton(inputs, form, operands, backend_reason), operands)


def operands_of(inputs: ScanInputs) -> ScanOperands:
    """What kernels and the torch chunk form run; NotImplementedError where there is no normal form."""
    initial = inputs.initial
    if initial is not None:
        initial = initial.to(torch.promote_types(inputs.q.dtype, torch.float32))
    given = (inputs.q, inputs.k, inputs.v, inputs.transition.lower().along(inputs.k))
    return scan_operands(*given, write=inputs.write, initial_state=initial, cu_seqlens=inputs.cu_seqlens)


def _registered(inputs: ScanInputs, form: Form, backend: str) -> ScanOperands | str:
    """What a registered backend runs, or why it cannot."""
    found = backend_named(backend)
    if form not in ("auto", "chunk"):
        return f"it has no form {form!r}"
    try:
        operands = operands_of(inputs)
    except NotImplementedError as error:
        return str(error)
    return found.reason(operands) or operands


def _operands_or_obstacle(inputs: ScanInputs, form: Form, device: torch.device) -> ScanOperands | str:
    """What the Triton kernels run on ``device``, or why they cannot. Lowering may cost a kernel: it is done once."""
    if form == "parallel":
        return "the parallel form is written in torch only"
    obstacle = device_obstacle(device)
    if obstacle is not None:
        return obstacle
    if form == "recurrent" and _needs_gradient(inputs):
        return "its recurrent form has no gradients"
    if not torch.compiler.is_compiling() and is_transformed():
        return "forward-mode and functorch derivatives are those of torch"
    try:
        operands = operands_of(inputs)
    except NotImplementedError as error:
        return str(error)
    return size_obstacle(operands.q.dtype, operands.q.shape[-1], operands.v.shape[-1]) or operands


def _triton(inputs: ScanInputs, form: Form, operands: ScanOperands, backend_reason: str) -> Explanation:
    if form == "recurrent" or form == "chunk":
        return Explanation(form, "triton", "asked for", backend_reason)
    if inputs.seq_len < SHORTEST_CHUNKED_TRITON and not _needs_gradient(inputs):
        reason = f"{inputs.seq_len} tokens are fewer than {SHORTEST_CHUNKED_TRITON}, without gradients"
        return Explanation("recurrent", "triton", reason, backend_reason)
    direction = _direction(inputs, operands.erases, operands.num_steps)
    return Explanation("chunk", "triton", direction, backend_reason)


def _torch(inputs: ScanInputs, form: Form, backend_reason: str) -> Explanation:
    if form == "recurrent":
        return Explanation("recurrent", "torch", "asked for", backend_reason)
    try:
        found = inputs.transition.lower().along(inputs.k)
        direction = _direction(inputs, found.erase is not None, num_micro_steps(found, inputs.k))
    except NotImplementedError as error:
        if form != "auto":
            raise
        return Explanation("recurrent", "torch", f"no chunk form: {error}", backend_reason)
    if form == "chunk" or form == "parallel":
        return Explanation(form, "torch", "asked for", backend_reason)
    if inputs.seq_len < SHORTEST_CHUNKED:
        reason = f"{inputs.seq_len} tokens are fewer than {SHORTEST_CHUNKED}"
        return Explanation("recurrent", "torch", reason, backend_reason)
    return Explanation("chunk", "torch", direction, backend_reason)


def _direction(inputs: ScanInputs, erases: bool, num_steps: int) -> str:
    if not erases:
        return "no erasure"
    if num_steps == (1 if inputs.k.ndim == 4 else inputs.k.shape[2]):
        return "erases along the write key"
    name = copied_key(inputs)
    if name is not None:
        return f"erases along a copy of the write key, then writes; give k itself as {name} for half the micro-steps"
    return "erases along a direction of its own, then writes"


def _needs_gradient(inputs: ScanInputs) -> bool:
    fields = (x for _, x, _ in inputs.transition.tensors())
    return needs_gradient((inputs.q, inputs.k, inputs.v, inputs.write, inputs.initial, *fields))


def _name(device: torch.device) -> str:
    return "the CPU" if device.type == "cpu" else device.type
