"""Run a recurrence: S_t = S_{t-1} M_t + w_t v_t k_t^T, o_t = scale * S_t q_t.

``recurrent`` is the definition: one token after another through ``Transition.apply``. ``chunk`` runs the normal form
of ``Transition.lower`` as matrix products. Triton's kernels run either from it. ``step`` is one token.

Shapes: B batch, T time, n writes a token, H key heads, HV value heads, K key_dim, V value_dim, N packed documents.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from statemix.kernels import Segment, backend_named, chunk_kernels, chunk_scan, expand_heads, recurrent_kernels
from statemix.kernels.spans import power_of_2_from
from statemix.transitions.base import Transition

from .choice import Choice, Explanation, Form, choose, operands_of
from .inputs import (
    ScanInputs,
    check_inputs,
    check_offsets,
    check_values,
    warn_of_a_copied_key,
    warn_of_swapped_axes,
)

_validate_on_gpu: ContextVar[bool] = ContextVar("statemix_validate", default=False)


class ScanResult(NamedTuple):
    """Output [B, T, HV, V] in the dtype of q; final state [B or N, HV, V, K], float32 (float64 for float64 inputs)."""

    output: Tensor
    final_state: Tensor


@contextmanager
def validate() -> Iterator[None]:
    """Check values (log decays <= 0, offsets in order) on a GPU as well; outside, a check there would stall it."""
    token = _validate_on_gpu.set(True)
    try:
        yield
    finally:
        _validate_on_gpu.reset(token)


def scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    transition: Transition,
    *,
    write: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    form: Form = "auto",
    backend: str = "auto",
    chunk_size: int = 64,
    recompute: bool = False,
) -> ScanResult:
    """Run a sequence through a transition.

    Args:
        q: [B, T, H, K]. q, k and v share one dtype; gates, beta, write and state have that one or float32.
        k: [B, T, H, K], or [B, T, n, H, K] for n writes a token.
        v: [B, T, HV, V], or [B, T, n, HV, V]; value head h uses key head h // (HV / H).
        transition: M_t.
        write: w, [B, T, HV], or [B, T, n, HV]; 1 if None. Under ``BlockDiagonal`` a last axis of blocks is allowed.
        scale: factor on the output; K ** -0.5 if None.
        initial_state: [B, HV, V, K], or [N, HV, V, K] with ``cu_seqlens``; zeros if None.
        cu_seqlens: int32 [N + 1], offsets of packed documents, B = 1. Documents may be empty. Rows after the last
            offset give zeros.
        form: "recurrent" (the definition, any transition), "chunk" (needs ``transition.lower``), "parallel" (one chunk
            as long as the sequence, O(T^2) memory, for teaching and tests), "auto".
        backend: "torch", "triton" (for transitions with a normal form), "auto": Triton on a GPU where it can; or a name
            given to ``statemix.kernels.register_backend``.
        chunk_size: tokens a chunk of the torch chunk form, a power of two from 16 to 128. Triton's kernels have their
            own in a table. No result depends on it.
        recompute: save memory: keep no states for the backward pass, which then computes them once more.

    Returns:
        ScanResult(output, final_state). Gradients flow to every tensor and through both.

    Raises:
        ValueError: a shape, dtype, offset or log decay is not as above.
        NotImplementedError: form="chunk" or "parallel" for a transition without a normal form; a backend asked for
            where it cannot run; a second derivative through it.

    >>> q = k = v = torch.ones(1, 3, 1, 1)
    >>> scan(q, k, v, Identity(), scale=1.0).output.flatten()
    tensor([1., 2., 3.])
    """
    inputs = check_inputs(q, k, v, transition, write, initial_state, cu_seqlens, chunk_size)
    scale = inputs.key_dim**-0.5 if scale is None else float(scale)
    with _without_autocast(q.device.type):
        chosen = choose(inputs, form, backend, q.device)
        _check_what_can_be_read(inputs, chosen.explanation)
        if recompute and torch.is_grad_enabled() and chosen.explanation.backend != "triton":
            arguments = (inputs, chosen, scale, chunk_size)
            results = checkpoint(_run, *arguments, use_reentrant=False, preserve_rng_state=False)
            return ScanResult(*results)
        return _run(inputs, chosen, scale, chunk_size, recompute=recompute)


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    transition: Transition,
    *,
    write: Tensor | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    form: Form = "auto",
    backend: str = "auto",
    chunk_size: int = 64,
    device: torch.device | str | None = None,
) -> Explanation:
    """Say what ``scan`` would run for these arguments, and why; raises as ``scan`` would.

    Args:
        device: where the arguments would be, if not where they are: tensors on the meta device serve to ask.
    """
    inputs = check_inputs(q, k, v, transition, write, initial_state, cu_seqlens, chunk_size)
    return choose(inputs, form, backend, q.device if device is None else torch.device(device)).explanation


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    transition: Transition,
    *,
    state: Tensor,
    write: Tensor | None = None,
    scale: float | None = None,
) -> ScanResult:
    """One token, S M_t + w v k^T and its read-out, in the recurrent form: what decoding runs.

    Args:
        q, k, v, transition, write: as in ``scan``, with T = 1.
        state: [B, HV, V, K]; it is not modified.

    Returns:
        ScanResult(output [B, 1, HV, V], final_state [B, HV, V, K]).
    """
    if q.ndim != 4 or q.shape[1] != 1:
        raise ValueError(f"q: expected [B, 1, H, K], got {list(q.shape)}; use scan for several tokens")
    return scan(q, k, v, transition, write=write, scale=scale, initial_state=state, form="recurrent")


def segment_summary(k: Tensor, v: Tensor, transition: Transition, *, write: Tensor | None = None) -> Segment:
    """The affine map S -> S P + H of a run of tokens; ``statemix.kernels.merge`` joins two.

    Args:
        k, v, transition, write: as in ``scan``.

    Returns:
        Segment(P [B, HV, K, K], H [B, HV, V, K]).
    """
    value_dim, key_dim = v.shape[-1], k.shape[-1]
    value = torch.cat([v, v.new_zeros(*v.shape[:-1], key_dim)], dim=-1)
    eye = torch.eye(key_dim, dtype=torch.promote_types(k.dtype, torch.float32), device=k.device)
    start = torch.cat([eye.new_zeros(value_dim, key_dim), eye]).expand(k.shape[0], v.shape[-2], -1, -1)
    q = k if k.ndim == 4 else k[:, :, 0]
    update, product = scan(q, k, value, transition, write=write, initial_state=start).final_state.split(
        [value_dim, key_dim], dim=-2
    )
    return Segment(product, update)


def _check_what_can_be_read(inputs: ScanInputs, chosen: Explanation) -> None:
    """Checks of values, where reading them stalls nothing."""
    if torch.compiler.is_compiling():
        return
    is_free = inputs.q.device.type == "cpu" or _validate_on_gpu.get()
    if is_free or chosen.backend == "torch":  # torch forms read the offsets in any case
        check_offsets(inputs)
    if is_free:
        check_values(inputs.transition)
        warn_of_a_copied_key(inputs)
        warn_of_swapped_axes(inputs)


def _without_autocast(device_type: str) -> AbstractContextManager[object]:
    """Entering and leaving torch's context takes some 5 us, also where autocast is off already."""
    return torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else nullcontext()


def _run(inputs: ScanInputs, chosen: Choice, scale: float, chunk_size: int, *, recompute: bool = False) -> ScanResult:
    """What was chosen; kernels leave q, k and v their dtype."""
    form, backend, operands = chosen.explanation.form, chosen.explanation.backend, chosen.operands
    if operands is None:
        return _run_torch(inputs, form, scale, chunk_size)
    if backend != "triton":
        output, state = backend_named(backend).scan(operands, scale=scale)
    elif form == "recurrent":
        output, state = recurrent_kernels(operands, scale=scale)
    else:
        output, state = chunk_kernels(operands, scale=scale, recompute=recompute)
    return ScanResult(output, operands.whole_state(state))


def _run_torch(inputs: ScanInputs, form: str, scale: float, chunk_size: int) -> ScanResult:
    """The torch forms, in the dtype of the state."""
    dtype, inputs = inputs.q.dtype, inputs.in_state_dtype()
    if form == "recurrent":
        output, state = _recurrent(inputs, inputs.initial_state(), scale)
        return ScanResult(output.to(dtype), state)
    operands = operands_of(inputs)
    chunk_size = chunk_size if form == "chunk" else power_of_2_from(inputs.seq_len)
    output, state = chunk_scan(operands, scale=scale, chunk_size=chunk_size)
    return ScanResult(output.to(dtype), operands.whole_state(state))


def _recurrent(inputs: ScanInputs, state: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The definition, for a batch or document after document."""
    if inputs.cu_seqlens is None:
        return _recurrent_batch(inputs, state, scale)
    offsets = inputs.cu_seqlens.tolist()
    outputs, finals = [], []
    for n, (start, end) in enumerate(zip(offsets, offsets[1:], strict=False)):
        output, final = _recurrent_batch(inputs.between(start, end), state[n : n + 1], scale)
        outputs.append(output)
        finals.append(final)
    outputs.append(state.new_zeros(1, inputs.seq_len - offsets[-1], *state.shape[1:3]))
    return torch.cat(outputs, dim=1), torch.cat(finals)


def _recurrent_batch(inputs: ScanInputs, state: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    if inputs.seq_len == 0:
        return state.new_zeros(state.shape[0], 0, *state.shape[1:3]), state
    num_heads = state.shape[1]
    q = expand_heads(inputs.q, num_heads, dim=2).unbind(1)
    k, v = inputs.writes()  # k with w, [B, T, n, HV, K], and v
    factors = [step.expand_heads(num_heads).tokens(inputs.seq_len) for step in inputs.transition.steps()]
    num_writes, outputs = k.shape[2], []
    for t, (q_t, k_t, v_t) in enumerate(zip(q, k.unbind(1), v.unbind(1), strict=True)):
        for j in range(max(num_writes, len(factors))):
            if j < len(factors):
                state = factors[j][t].apply(state)
            write = j - max(len(factors) - num_writes, 0)  # one write after several erasures comes last
            if write >= 0:
                state = state + v_t[:, write, :, :, None] * k_t[:, write, :, None, :]
        outputs.append((state @ q_t.unsqueeze(-1)).squeeze(-1))
    return scale * torch.stack(outputs, dim=1), state
