"""The additive family as operators of torch: what autograd, torch.compile and CUDA graphs see of the kernels.

    S <- S Diag(e^{log_decay_t}) + v_t k_t^T        o_t = scale * S q_t

    statemix::additive_scan            output, final state, and what backward needs besides the inputs
    statemix::additive_scan_backward   gradients of q, k, v, log_decay and the initial state
    statemix::recurrent_scan           output and final state, one token after another, without gradients

On a GPU, and on the CPU under Triton's interpreter, they run the Triton kernels, which are imported then. Elsewhere on
the CPU they run the torch chunk form, so that they mean the same on every machine. Arguments are taken as they are:
``scan`` checks and reduces them.

Shapes: B batch, T time, HQ HK HV heads, K key_dim, V value_dim, N sequences. q [B, T, HQ, K], k [B, T, HK, K],
v [B, T, HV, V] of one dtype; log_decay None, [HV], [B, T, HV] or [B, T, HV, K]; states [N, HV, V, K] in float32
(float64 for float64 inputs, which the kernels do not take); cu_seqlens [N + 1] int32 with B = 1, or None.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from . import additive_torch
from .additive_operands import AdditiveOperands
from .availability import DTYPES, is_interpreted
from .launch_config import additive_config, device_family
from .spans import ceil_div

_PLAIN = frozenset((Tensor, torch.nn.Parameter, type(None)))
_TENSORS = "Tensor q, Tensor k, Tensor v, Tensor? log_decay, Tensor? initial_state, Tensor? cu_seqlens"


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
    operands = (q, k, v, log_decay, initial_state, cu_seqlens)
    has_backward = needs_gradient(*operands)
    arguments = (*operands, scale, has_backward and not recompute)
    if _is_traced(*operands):
        output, final_state, _ = torch.ops.statemix.additive_scan(*arguments)
    elif has_backward:
        output, final_state = _EagerScan.apply(*arguments)  # type: ignore[no-untyped-call]
    else:
        output, final_state, _ = _forward(*arguments)
    return output, final_state


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
    operands = (q, k, v, log_decay, initial_state, cu_seqlens)
    assert not needs_gradient(*operands)
    if _is_traced(*operands):
        output, final_state = torch.ops.statemix.recurrent_scan(*operands, scale)
    else:
        output, final_state = _recurrent(*operands, scale)
    return output, final_state


def needs_gradient(*tensors: Tensor | None) -> bool:
    """A backward pass through one of these tensors can follow."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _is_traced(*operands: Tensor | None) -> bool:
    """A compiler, a dispatch mode or a subclass of tensors watches: it must see an operator.

    Otherwise the kernels are called at once. An operator with gradients takes some 0.1 ms more of Python, longer than
    a short scan takes on a GPU.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return True
    return not _PLAIN.issuperset(map(type, operands))


def _forward(*arguments: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
    *tensors, scale, save = arguments
    operands = AdditiveOperands(*tensors)
    with _on_device(operands):
        output, final_state, saved = _kernels(operands).additive_forward(operands, scale=scale, save=save)
    return output, final_state, saved


def _forward_fake(*arguments: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
    *tensors, _, save = arguments
    operands = AdditiveOperands(*tensors)
    saved = _saved_like(operands) if save and _has_kernels(operands) else []
    return operands.v.new_empty(operands.v.shape), operands.empty_state(), saved


def _saved_like(operands: AdditiveOperands) -> list[Tensor]:
    """Tensors of the shapes that ``additive_triton.additive_forward`` saves.

    Compilers ask with symbolic sizes: T is divided, and compared with nothing, so no graph is tied to one T.
    """
    q, _, v, log_decay, _, cu_seqlens = operands
    (batch, seq_len, num_heads, value_dim), key_dim = v.shape, q.shape[-1]
    size = additive_config(device_family(q.device), int(key_dim), int(value_dim), q.dtype).chunk_size
    if cu_seqlens is None:
        num_chunks = batch * ceil_div(seq_len, size)
    else:
        num_chunks = seq_len // size + cu_seqlens.shape[0] - 1
    states = v.new_empty(num_chunks, num_heads, key_dim, value_dim)
    if log_decay is None or log_decay.ndim == 1:
        return [states]
    if log_decay.ndim == 3:
        return [states, q.new_empty(2, num_heads, batch * seq_len, dtype=torch.float32)]
    reach, rest = (q.new_empty(batch, seq_len, num_heads, key_dim) for _ in range(2))
    total = q.new_empty(num_chunks, num_heads, key_dim, dtype=torch.float32)
    return [states, reach, rest, total, q.new_empty(num_chunks, num_heads, size, size)]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    *tensors, ctx.scale, _ = inputs
    ctx.set_materialize_grads(False)  # what is saved is an output too: its gradient would be zeros as large
    ctx.save_for_backward(*tensors, *output[2])


def _differentiate(ctx: Any, grad_output: Tensor | None, grad_final: Tensor | None, _: Any) -> tuple[Any, ...]:
    return _gradients(torch.ops.statemix.additive_scan_backward, ctx, grad_output, grad_final)


def _gradients(
    backward: Callable[..., tuple[Tensor | None, ...]], ctx: Any, grad_output: Tensor | None, grad_final: Tensor | None
) -> tuple[Any, ...]:
    if torch.is_grad_enabled():
        raise NotImplementedError("create_graph: additive_scan has no second derivative; use backend='torch'")
    if grad_output is None and grad_final is None:
        return (None,) * 8
    tensors = ctx.saved_tensors  # once: a checkpoint refuses to hand them out twice
    operands, saved = tensors[:6], tensors[6:]
    wanted = ctx.needs_input_grad[:5]
    grads = backward(grad_output, grad_final, *operands, list(saved), ctx.scale, wanted[3])
    return *(grad if is_wanted else None for grad, is_wanted in zip(grads, wanted, strict=True)), None, None, None


class _EagerScan(torch.autograd.Function):
    """``statemix::additive_scan`` without the dispatcher."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        output, final_state, saved = _forward(*arguments)
        _setup_context(ctx, arguments, (output, final_state, saved))
        return output, final_state

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return _gradients(_backward, ctx, *grads)


def _backward(grad_output: Tensor | None, grad_final: Tensor | None, *arguments: Any) -> tuple[Tensor | None, ...]:
    *tensors, saved, scale, needs_decay_grad = arguments
    operands = AdditiveOperands(*tensors)
    if grad_output is None:
        grad_output = torch.zeros_like(operands.v)
    with _on_device(operands):
        dq, dk, dv, d_log_decay, d_initial = _kernels(operands).additive_backward(
            grad_output, grad_final, operands, saved, scale=scale, needs_decay_grad=needs_decay_grad
        )
    if operands.log_decay is not None and d_log_decay is not None:
        dtype = operands.log_decay.dtype
        d_log_decay = d_log_decay.to(dtype, memory_format=torch.contiguous_format).contiguous()
    return dq, dk, dv, d_log_decay, d_initial


def _backward_operator(*arguments: Any) -> tuple[Tensor, ...]:
    """``_backward`` with something in place of a gradient that nobody wants: an operator's result cannot be None."""
    dq, *grads = _backward(*arguments)
    assert dq is not None
    return dq, *(dq.new_empty(0) if grad is None else grad for grad in grads)


def _backward_fake(grad_output: Tensor | None, grad_final: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:
    *tensors, _, _, needs_decay_grad = arguments
    operands = AdditiveOperands(*tensors)
    d_log_decay = operands.q.new_empty(0)
    if needs_decay_grad and operands.log_decay is not None:
        d_log_decay = operands.log_decay.new_empty(operands.log_decay.shape)
    dq, dk, dv = (x.new_empty(x.shape) for x in operands[:3])
    return dq, dk, dv, d_log_decay, operands.empty_state()


def _recurrent(*arguments: Any) -> tuple[Tensor, Tensor]:
    *tensors, scale = arguments
    operands = AdditiveOperands(*tensors)
    if not _has_kernels(operands):
        return additive_torch.recurrent_forward(operands, scale=scale)
    from .recurrent_triton import recurrent_forward

    with _on_device(operands):
        return recurrent_forward(operands, scale=scale)


def _recurrent_fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    operands = AdditiveOperands(*arguments[:-1])
    return operands.v.new_empty(operands.v.shape), operands.empty_state()


def _has_kernels(operands: AdditiveOperands) -> bool:
    return operands.q.dtype in DTYPES and (operands.q.device.type == "cuda" or is_interpreted())


def _kernels(operands: AdditiveOperands) -> ModuleType:
    return _triton_kernels() if _has_kernels(operands) else additive_torch


@cache  # the import statement takes a microsecond each time
def _triton_kernels() -> ModuleType:
    from . import additive_triton

    return additive_triton


def _on_device(operands: AdditiveOperands) -> AbstractContextManager[object]:
    """Triton launches on the current device, whatever the tensors are on."""
    device = operands.q.device
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def _register(name: str, schema: str, kernel: Any, fake: Any) -> None:
    torch.library.define(name, schema, tags=torch.Tag.pt2_compliant_tag)
    torch.library.impl(name, ("CPU", "CUDA"), kernel)
    torch.library.register_fake(name, fake)


_register(
    "statemix::additive_scan",
    f"({_TENSORS}, float scale, bool save) -> (Tensor output, Tensor final_state, Tensor[] saved)",
    _forward,
    _forward_fake,
)
_register(
    "statemix::additive_scan_backward",
    f"(Tensor? grad_output, Tensor? grad_final, {_TENSORS}, Tensor[] saved, float scale, bool needs_decay_grad)"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor d_log_decay, Tensor d_initial_state)",
    _backward_operator,
    _backward_fake,
)
_register(
    "statemix::recurrent_scan",
    f"({_TENSORS}, float scale) -> (Tensor output, Tensor final_state)",
    _recurrent,
    _recurrent_fake,
)
torch.library.register_autograd("statemix::additive_scan", _differentiate, setup_context=_setup_context)
