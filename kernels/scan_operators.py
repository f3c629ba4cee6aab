"""A family of kernels as operators of torch: what autograd, torch.compile and CUDA graphs see of a scan.

    statemix::NAME            output, final state, and what backward needs besides the inputs
    statemix::NAME_backward   the gradients of all tensors but the offsets
    statemix::RECURRENT       output and final state, one token after another, without gradients

``additive_op`` and ``delta_op`` each define one family. Its operands are a named tuple: tensors or None, the offsets
``cu_seqlens`` last among them, then plain values. Arguments are taken as they are: ``scan`` checks and reduces them.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from .availability import DTYPES, is_interpreted

_PLAIN = frozenset((Tensor, torch.nn.Parameter, type(None), bool, int))


class Forward(Protocol):
    """Output, final state, and with ``save`` what backward can make use of."""

    def __call__(self, operands: Any, *, scale: float, save: bool) -> tuple[Tensor, Tensor, list[Tensor]]: ...


class Backward(Protocol):
    """The gradient of every tensor of ``operands`` before the offsets, None for that of a missing one."""

    def __call__(
        self,
        grad_output: Tensor,
        grad_final: Tensor | None,
        operands: Any,
        saved: list[Tensor],
        *,
        scale: float,
        needs_decay_grad: bool,
    ) -> tuple[Tensor | None, ...]: ...


class Recurrent(Protocol):
    """Output and final state."""

    def __call__(self, operands: Any, *, scale: float) -> tuple[Tensor, Tensor]: ...


@dataclass(eq=False)
class ScanOperators:
    """The operators of one family, and the scans that call them.

    Attributes:
        name: of the scan, ``additive_scan``.
        recurrent_name: of its recurrent form.
        operands: the type of the operands.
        schema: the operands as arguments of an operator.
        forward, backward, recurrent: the kernels; on the CPU their stand-ins in torch.
        saved_like: unwritten tensors like those that the Triton forward pass saves. Compilers ask with symbolic sizes.
    """

    name: str
    recurrent_name: str
    operands: Any
    schema: str
    forward: Forward
    backward: Backward
    recurrent: Recurrent
    saved_like: Callable[[Any], list[Tensor]]

    def __post_init__(self) -> None:
        fields: tuple[str, ...] = self.operands._fields
        self.num_differentiable = fields.index("cu_seqlens")
        self.num_tensors = self.num_differentiable + 1
        self.decay = fields.index("log_decay")

    def scan(self, operands: Any, *, scale: float, recompute: bool) -> tuple[Tensor, Tensor]:
        """Output and final state as the operands make them empty, with gradients to every tensor.

        Raises:
            NotImplementedError: in a backward pass with create_graph=True; there is no second derivative.
        """
        has_backward = needs_gradient(operands[: self.num_tensors])
        save = has_backward and not recompute
        if is_traced(operands):
            output, final_state, _ = getattr(torch.ops.statemix, self.name)(*operands, scale, save)
        elif has_backward:
            output, final_state = _EagerScan.apply(self, *operands, scale, save)  # type: ignore[no-untyped-call]
        else:
            with on_device(operands.q):
                output, final_state, _ = self.forward(operands, scale=scale, save=False)
        return output, final_state

    def recurrent_scan(self, operands: Any, *, scale: float) -> tuple[Tensor, Tensor]:
        """``scan`` one token after another: faster for a few tokens, and without gradients."""
        assert not needs_gradient(operands[: self.num_tensors])
        if is_traced(operands):
            output, final_state = getattr(torch.ops.statemix, self.recurrent_name)(*operands, scale)
        else:
            with on_device(operands.q):
                output, final_state = self.recurrent(operands, scale=scale)
        return output, final_state

    def register(self) -> None:
        """Define the operators."""
        grads = ", ".join(f"Tensor d_{name}" for name in self.operands._fields[: self.num_differentiable])
        _register(
            self.name,
            f"({self.schema}, float scale, bool save) -> (Tensor output, Tensor final_state, Tensor[] saved)",
            self._forward,
            self._forward_fake,
        )
        _register(
            f"{self.name}_backward",
            f"(Tensor? grad_output, Tensor? grad_final, {self.schema}, Tensor[] saved, float scale,"
            f" bool needs_decay_grad) -> ({grads})",
            self._backward_operator,
            self._backward_fake,
        )
        _register(
            self.recurrent_name,
            f"({self.schema}, float scale) -> (Tensor output, Tensor final_state)",
            self._recurrent,
            self._recurrent_fake,
        )
        torch.library.register_autograd(f"statemix::{self.name}", self._differentiate, setup_context=self.setup_context)

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        """Keep what ``gradients`` needs."""
        num_tensors = self.num_tensors
        ctx.values, ctx.scale = inputs[num_tensors:-2], inputs[-2]
        ctx.set_materialize_grads(False)  # what is saved is an output too: its gradient would be zeros as large
        ctx.save_for_backward(*inputs[:num_tensors], *output[2])

    def gradients(
        self,
        ctx: Any,
        grad_output: Tensor | None,
        grad_final: Tensor | None,
        *,
        is_wanted: tuple[bool, ...],
        backward: Callable[..., tuple[Tensor | None, ...]],
    ) -> tuple[Tensor | None, ...]:
        """One for each argument of the scan."""
        if torch.is_grad_enabled():
            raise NotImplementedError(f"create_graph: {self.name} has no second derivative; use backend='torch'")
        if grad_output is None and grad_final is None:
            return (None,) * len(is_wanted)
        tensors, num_tensors = ctx.saved_tensors, self.num_tensors  # once: a checkpoint refuses to hand them out twice
        operands, saved, wants_decay = tensors[:num_tensors], list(tensors[num_tensors:]), is_wanted[self.decay]
        grads = backward(grad_output, grad_final, *operands, *ctx.values, saved, ctx.scale, wants_decay)
        found = [grad if wanted else None for grad, wanted in zip(grads, is_wanted, strict=False)]
        return (*found, *(None,) * (len(is_wanted) - len(found)))

    def _forward(self, *arguments: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
        *given, scale, save = arguments
        operands = self.operands(*given)
        with on_device(operands.q):
            return self.forward(operands, scale=scale, save=save)

    def _forward_fake(self, *arguments: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
        *given, _, save = arguments
        operands = self.operands(*given)
        saved = self.saved_like(operands) if save and has_kernels(operands.q) else []
        return operands.empty_output(), operands.empty_state(), saved

    def _differentiate(self, ctx: Any, grad_output: Tensor | None, grad_final: Tensor | None, _: Any) -> Any:
        backward = getattr(torch.ops.statemix, f"{self.name}_backward")
        return self.gradients(ctx, grad_output, grad_final, is_wanted=ctx.needs_input_grad, backward=backward)

    def _backward(
        self, grad_output: Tensor | None, grad_final: Tensor | None, *arguments: Any
    ) -> tuple[Tensor | None, ...]:
        *given, saved, scale, needs_decay_grad = arguments
        operands = self.operands(*given)
        if grad_output is None:
            grad_output = operands.empty_output().zero_()
        with on_device(operands.q):
            return self.backward(
                grad_output, grad_final, operands, saved, scale=scale, needs_decay_grad=needs_decay_grad
            )

    def _backward_operator(self, *arguments: Any) -> tuple[Tensor, ...]:
        """``_backward`` as compilers are told: contiguous, and with something in place of None, which is no result."""
        dq, *grads = self._backward(*arguments)
        assert dq is not None
        return dq.contiguous(), *(dq.new_empty(0) if grad is None else grad.contiguous() for grad in grads)

    def _backward_fake(
        self, grad_output: Tensor | None, grad_final: Tensor | None, *arguments: Any
    ) -> tuple[Tensor, ...]:
        *given, _, _, needs_decay_grad = arguments
        operands = self.operands(*given)
        like: list[Tensor | None] = [*operands[: self.num_differentiable - 1], operands.empty_state()]
        if not needs_decay_grad:
            like[self.decay] = None
        return tuple(operands.q.new_empty(0) if x is None else x.new_empty(x.shape) for x in like)

    def _recurrent(self, *arguments: Any) -> tuple[Tensor, Tensor]:
        *given, scale = arguments
        operands = self.operands(*given)
        with on_device(operands.q):
            return self.recurrent(operands, scale=scale)

    def _recurrent_fake(self, *arguments: Any) -> tuple[Tensor, Tensor]:
        operands = self.operands(*arguments[:-1])
        return operands.empty_output(), operands.empty_state()


class _EagerScan(torch.autograd.Function):
    """``statemix::NAME`` without the dispatcher."""

    @staticmethod
    def forward(ctx: Any, operators: ScanOperators, *arguments: Any) -> tuple[Tensor, Tensor]:
        output, final_state, saved = operators._forward(*arguments)
        ctx.operators = operators
        operators.setup_context(ctx, arguments, (output, final_state, saved))
        return output, final_state

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        operators, is_wanted = ctx.operators, ctx.needs_input_grad[1:]
        return None, *operators.gradients(ctx, *grads, is_wanted=is_wanted, backward=operators._backward)


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


def _register(name: str, schema: str, kernel: Any, fake: Any) -> None:
    name = f"statemix::{name}"
    torch.library.define(name, schema, tags=torch.Tag.pt2_compliant_tag)
    torch.library.impl(name, ("CPU", "CUDA"), kernel)
    torch.library.register_fake(name, fake)
