"""A scan as operators of torch: what autograd, torch.compile and CUDA graphs see of it.

    statemix::scan            output, final state, and what backward needs besides the operands
    statemix::scan_backward   the gradients of all tensors but the offsets
    statemix::recurrent_scan  output and final state, one token after another, without gradients

On a GPU, and on the CPU under Triton's interpreter, they run the Triton kernels, which are imported then: those of the
delta family where there are erase pairs, else those of the additive one. Elsewhere they run the torch chunk form, so
that they mean the same on every machine. Operands are taken as they are: ``scan`` checks and ``scan_operands`` makes
them. Shapes: as in ``operands``.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from . import torch_kernels
from .availability import DTYPES, is_interpreted
from .launch_config import DeltaConfig, additive_config, delta_config, device_arch
from .operands import Decay, Gradients, Saved, ScanOperands
from .spans import ceil_div, num_spans

Results = tuple[Tensor, Tensor]
SCHEMA = (
    "Tensor q, Tensor? a, Tensor b, Tensor v, Tensor? erase_beta, Tensor? write, Tensor? log_decay,"
    " Tensor? initial_state, Tensor? cu_seqlens, bool erases, bool reads_before_decay, int blocks"
)
NUM_OPERANDS, NUM_TENSORS, NUM_GRADIENTS = len(ScanOperands._fields), 9, len(Gradients._fields)
LOG_DECAY = Gradients._fields.index("log_decay")
_PLAIN = frozenset((Tensor, torch.nn.Parameter, type(None), bool, int))


def chunk_kernels(operands: ScanOperands, *, scale: float, recompute: bool = False) -> Results:
    """Output [B, T, HO, V] in the dtype of q and final state [N, HV, V, K], with gradients to every tensor.

    Args:
        recompute: keep nothing for the backward pass, which then computes it once more.

    Raises:
        NotImplementedError: in a backward pass with create_graph=True; there is no second derivative.
    """
    has_backward = needs_gradient(operands.differentiable)
    save = has_backward and not recompute
    if is_traced(operands):
        output, final_state, _ = torch.ops.statemix.scan(*operands, scale, save)
    elif has_backward:
        output, final_state = _EagerScan.apply(*operands, scale, save)  # type: ignore[no-untyped-call]
    else:
        with on_device(operands.q):
            output, final_state, _ = _kernels(operands).forward(operands, scale=scale, save=False)
    return output, final_state


def recurrent_kernels(operands: ScanOperands, *, scale: float) -> Results:
    """``chunk_kernels`` one token after another: faster for a few tokens, and without gradients."""
    assert not needs_gradient(operands.differentiable)
    if is_traced(operands):
        output, final_state = torch.ops.statemix.recurrent_scan(*operands, scale)
        return output, final_state
    return _recurrent(*operands, scale)


def needs_gradient(tensors: Iterable[Tensor | None]) -> bool:
    """A backward pass through one of these tensors can follow."""
    if torch.is_grad_enabled():
        for x in tensors:
            if x is not None and x.requires_grad:
                return True
    return False


def is_traced(operands: Iterable[Tensor | int | None]) -> bool:
    """A compiler, a dispatch mode or a subclass of tensors watches: it must see an operator.

    Otherwise the kernels are called at once. An operator with gradients takes some 0.1 ms more of Python, longer than
    a short scan takes on a GPU.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return True
    return not _PLAIN.issuperset(map(type, operands))


def has_kernels(q: Tensor) -> bool:
    """Triton's kernels run what has this q; elsewhere torch does."""
    return q.dtype in DTYPES and (q.device.type == "cuda" or is_interpreted())


def on_device(q: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, whatever the tensors are on."""
    device = q.device
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def _kernels(operands: ScanOperands) -> Any:
    return _triton_kernels(operands.erases) if has_kernels(operands.q) else torch_kernels


@cache  # the import statement takes a microsecond each time
def _triton_kernels(erases: bool) -> ModuleType:
    from .triton import additive, delta

    return delta if erases else additive


def _forward(*arguments: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
    *given, scale, save = arguments
    output, final_state, saved = _run_forward(ScanOperands(*given), scale, save)
    return output, final_state, [] if saved is None else saved.tensors()


def _run_forward(operands: ScanOperands, scale: float, save: bool) -> tuple[Tensor, Tensor, Saved | None]:
    with on_device(operands.q):
        results: tuple[Tensor, Tensor, Saved | None] = _kernels(operands).forward(operands, scale=scale, save=save)
    return results


def _forward_fake(*arguments: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
    *given, _, save = arguments
    operands = ScanOperands(*given)
    saved = saved_like(operands).tensors() if save and has_kernels(operands.q) else []
    return operands.empty_output(), operands.empty_state(), saved


def _backward(
    grad_output: Tensor | None,
    grad_final: Tensor | None,
    operands: ScanOperands,
    saved: Saved | None,
    scale: float,
    needs_decay_grad: bool,
) -> Gradients:
    if grad_output is None:
        grad_output = operands.empty_output().zero_()
    with on_device(operands.q):
        grads: Gradients = _kernels(operands).backward(
            grad_output, grad_final, operands, saved, scale=scale, needs_decay_grad=needs_decay_grad
        )
    return grads


def _backward_operator(*arguments: Any) -> tuple[Tensor, ...]:
    """``_backward`` as compilers are told: contiguous, and with something in place of None, which is no result."""
    grad_output, grad_final, *given, tensors, segment_length, scale, needs_decay_grad = arguments
    operands = ScanOperands(*given)
    saved = Saved.of(tensors, operands, segment_length) if tensors else None
    grads = _backward(grad_output, grad_final, operands, saved, scale, needs_decay_grad)
    return tuple(grads.q.new_empty(0) if grad is None else grad.contiguous() for grad in grads)


def _backward_fake(grad_output: Tensor | None, grad_final: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:
    *given, _, _, _, needs_decay_grad = arguments
    operands = ScanOperands(*given)
    like: list[Any] = [*operands[: NUM_GRADIENTS - 1], operands.empty_state()]
    if not needs_decay_grad:
        like[LOG_DECAY] = None
    return tuple(operands.q.new_empty(0) if x is None else x.new_empty(x.shape) for x in like)


def _recurrent(*arguments: Any) -> Results:
    *given, scale = arguments
    operands = ScanOperands(*given)
    with on_device(operands.q):
        if not has_kernels(operands.q):
            return torch_kernels.recurrent_forward(operands, scale=scale)
        from .triton.recurrent import recurrent_forward

        return recurrent_forward(operands, scale=scale)


def _recurrent_fake(*arguments: Any) -> Results:
    operands = ScanOperands(*arguments[:-1])
    return operands.empty_output(), operands.empty_state()


def _keep(ctx: Any, inputs: tuple[Any, ...], saved: list[Tensor]) -> None:
    """What ``_differentiate`` needs of a forward pass."""
    ctx.values, ctx.scale = inputs[NUM_TENSORS:NUM_OPERANDS], inputs[NUM_OPERANDS]
    ctx.set_materialize_grads(False)  # what is saved is an output too: its gradient would be zeros as large
    ctx.save_for_backward(*inputs[:NUM_TENSORS], *saved)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    _keep(ctx, inputs, output[2])
    operands = ScanOperands(*inputs[:NUM_OPERANDS])
    ctx.segment_length = segments_of(operands)[1] if output[2] and operands.erases else 0


def _differentiate(
    ctx: Any,
    grad_output: Tensor | None,
    grad_final: Tensor | None,
    is_wanted: tuple[bool, ...],
    backward: Callable[[ScanOperands, list[Tensor], bool], Iterable[Tensor | None]],
) -> tuple[Tensor | None, ...]:
    """A gradient for each argument of ``statemix::scan``; ``backward`` takes operands, saved, and the wish for one."""
    if torch.is_grad_enabled():
        raise NotImplementedError("create_graph: the kernels have no second derivative; use backend='torch'")
    if grad_output is None and grad_final is None:
        return (None,) * len(is_wanted)
    tensors = ctx.saved_tensors  # once: a checkpoint refuses to hand them out twice
    operands = ScanOperands(*tensors[:NUM_TENSORS], *ctx.values)
    grads = backward(operands, list(tensors[NUM_TENSORS:]), is_wanted[LOG_DECAY])
    found = [grad if wanted else None for grad, wanted in zip(grads, is_wanted, strict=False)]
    return (*found, *(None,) * (len(is_wanted) - len(found)))


def _differentiate_operator(ctx: Any, grad_output: Tensor | None, grad_final: Tensor | None, _: Any) -> Any:
    def backward(operands: ScanOperands, saved: list[Tensor], needs_decay_grad: bool) -> Any:
        rest = (saved, ctx.segment_length, ctx.scale, needs_decay_grad)
        return torch.ops.statemix.scan_backward(grad_output, grad_final, *operands, *rest)

    return _differentiate(ctx, grad_output, grad_final, ctx.needs_input_grad, backward)


class _EagerScan(torch.autograd.Function):
    """``statemix::scan`` without the dispatcher."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Results:
        output, final_state, saved = _run_forward(ScanOperands(*arguments[:-2]), *arguments[-2:])
        _keep(ctx, arguments, [] if saved is None else saved.tensors())
        ctx.segment_length = 0 if saved is None else saved.segment_length
        return output, final_state

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, grad_final: Tensor | None) -> tuple[Any, ...]:
        def backward(operands: ScanOperands, tensors: list[Tensor], needs_decay_grad: bool) -> Gradients:
            saved = Saved.of(tensors, operands, ctx.segment_length) if tensors else None
            return _backward(grad_output, grad_final, operands, saved, ctx.scale, needs_decay_grad)

        return _differentiate(ctx, grad_output, grad_final, ctx.needs_input_grad, backward)


def saved_like(operands: ScanOperands) -> Saved:
    """Unwritten tensors like those that the Triton forward pass saves.

    Sizes may be symbolic: they are divided, and compared with nothing, so no graph is tied to one length.
    """
    q, v, decay = operands.q, operands.v, operands.decay
    (batch, num_rows, _, value_dim), heads, key_dim = v.shape, operands.num_heads, q.shape[-1]
    size = _config(operands).chunk_size
    num_chunks = num_spans(batch, num_rows, size, operands.num_documents)

    def keys() -> Tensor:
        return q.new_empty(batch, num_rows, heads, key_dim)

    saved = Saved(q.new_empty(num_chunks, heads, key_dim, value_dim))
    if decay is Decay.SCALAR:
        saved = saved._replace(gate=q.new_empty(2, heads, batch * num_rows, dtype=torch.float32))
    if decay is Decay.DIAGONAL:
        gate = q.new_empty(num_chunks, heads, key_dim, dtype=torch.float32)
        saved = saved._replace(query=keys(), erase=keys() if operands.erases else None, gate=gate)
    if operands.erases or decay is Decay.DIAGONAL:
        saved = saved._replace(scores=q.new_empty(num_chunks, heads, size, size), key=keys())
    if operands.erases:
        num_segments, length = segments_of(operands)
        maps = q.new_empty(num_segments, heads, key_dim, key_dim, dtype=torch.float32)
        u = v.new_empty(batch, num_rows, heads, value_dim)
        saved = saved._replace(u=u, maps=maps, segment_length=length)
    return saved


def segments_of(operands: ScanOperands) -> tuple[int, int]:
    """Segments of a scan over the micro-steps of erase pairs, and the length of one; 0 and 0 where nothing is cut.

    Sizes may be symbolic.
    """
    (batch, num_rows, _, value_dim), documents = operands.v.shape, operands.num_documents
    config = _config(operands)
    programs = operands.num_heads * ceil_div(value_dim, config.scan.block) * (batch if documents is None else documents)
    return config.partition_rule.segments(batch, num_rows, programs, documents)


def _config(operands: ScanOperands) -> DeltaConfig | Any:
    config = delta_config if operands.erases else additive_config
    q, value_dim = operands.q, operands.v.shape[-1]
    return config(device_arch(q.device), int(q.shape[-1]), int(value_dim), q.dtype)


def _register(name: str, schema: str, kernel: Any, fake: Any) -> None:
    name = f"statemix::{name}"
    torch.library.define(name, schema, tags=torch.Tag.pt2_compliant_tag)
    torch.library.impl(name, ("CPU", "CUDA"), kernel)
    torch.library.register_fake(name, fake)


_register(
    "scan",
    f"({SCHEMA}, float scale, bool save) -> (Tensor output, Tensor final_state, Tensor[] saved)",
    _forward,
    _forward_fake,
)
_register(
    "scan_backward",
    f"(Tensor? grad_output, Tensor? grad_final, {SCHEMA}, Tensor[] saved, SymInt segment_length, float scale,"
    f" bool needs_decay_grad) -> ({', '.join(f'Tensor d_{name}' for name in Gradients._fields)})",
    _backward_operator,
    _backward_fake,
)
_register(
    "recurrent_scan", f"({SCHEMA}, float scale) -> (Tensor output, Tensor final_state)", _recurrent, _recurrent_fake
)
torch.library.register_autograd("statemix::scan", _differentiate_operator, setup_context=_setup_context)
