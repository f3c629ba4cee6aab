"""Kernels from outside: another implementation of a scan under a name, for ``scan(..., backend=NAME)``.

One function says what it cannot run, one runs it, and one may give its gradients. A name that was registered runs only
where it is asked for; "auto" never takes it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from .operands import Gradients, ScanOperands
from .operators import NUM_GRADIENTS

BUILT_IN = ("auto", "torch", "triton")


class Forward(Protocol):
    """Output [B, T, HO, V] in the dtype of q, final state [N, HV, V, K], and a list of tensors for ``Backward``."""

    def __call__(self, operands: ScanOperands, /, *, scale: float) -> tuple[Any, ...]: ...


class Backward(Protocol):
    """Gradients of the operands; those that nobody asked for may be None."""

    def __call__(
        self, grad_output: Tensor, grad_final: Tensor, operands: ScanOperands, saved: list[Tensor], /, *, scale: float
    ) -> Gradients: ...


@dataclass(frozen=True)
class Backend:
    """See ``register_backend``."""

    name: str
    obstacle: Callable[[ScanOperands], str | None]
    forward: Forward
    backward: Backward | None = None

    def reason(self, operands: ScanOperands) -> str | None:
        """What ``obstacle`` says."""
        found = self.obstacle(operands)
        if found is not None and not isinstance(found, str):
            raise TypeError(
                f"obstacle: expected a reason in words or None of backend {self.name!r}, got {type(found).__name__}"
            )
        return found

    def scan(self, operands: ScanOperands, *, scale: float) -> tuple[Tensor, Tensor]:
        """Output and final state, with gradients to every tensor."""
        if self.backward is None:
            output, final_state = self.run(operands, scale=scale)[:2]
        else:
            output, final_state = _Scan.apply(self, scale, *operands)  # type: ignore[no-untyped-call]
        _expect("output", output, operands.empty_output())
        _expect("final_state", final_state, operands.empty_state())
        return output, final_state

    def run(self, operands: ScanOperands, *, scale: float) -> tuple[Any, ...]:
        """What ``forward`` returns, output and final state first."""
        made = self.forward(operands, scale=scale)
        if not isinstance(made, tuple) or not all(isinstance(x, Tensor) for x in made[:2]) or len(made) < 2:
            raise TypeError(
                f"forward: expected a tuple of output and final state of backend {self.name!r}, "
                f"got {type(made).__name__}; return both tensors"
            )
        return made


_BACKENDS: dict[str, Backend] = {}


def register_backend(
    name: str, obstacle: Callable[[ScanOperands], str | None], forward: Forward, backward: Backward | None = None
) -> None:
    """Let ``scan(..., backend=name)`` run another implementation.

    Args:
        name: neither "auto", "torch", "triton" nor registered before.
        obstacle: why these operands cannot be run, in words that end a sentence, or None. It may look at shapes,
            dtypes and devices, not at values.
        forward: ``forward(operands, *, scale)`` gives output [B, T, HO, V] in the dtype of q and final state
            [N, HV, V, K] in ``operands.state_dtype``; a third result is what ``backward`` gets as ``saved``.
        backward: ``backward(grad_output, grad_final, operands, saved, *, scale)`` gives ``Gradients``. None: autograd
            goes through ``forward``.

    Raises:
        ValueError: the name is taken.
        TypeError: what should be a function is none.
    """
    for key, given in {"obstacle": obstacle, "forward": forward, "backward": backward}.items():
        if not callable(given) and (key != "backward" or given is not None):
            raise TypeError(f"{key}: expected a function, got {type(given).__name__}; see register_backend")
    if not isinstance(name, str) or not name:
        raise ValueError(f"name: expected a word, got {name!r}; give the backend a name")
    taken = (*BUILT_IN, *_BACKENDS)
    if name in taken:
        raise ValueError(f"name: expected one that is not taken, got {name!r}; taken are {', '.join(taken)}")
    _BACKENDS[name] = Backend(name, obstacle, forward, backward)


def unregister_backend(name: str) -> None:
    """Forget a backend that was registered."""
    del _BACKENDS[name]


def backend_named(name: str) -> Backend:
    """The backend that was registered under ``name``; ValueError names the known ones."""
    if name not in _BACKENDS:
        *others, last = map(repr, (*BUILT_IN, *_BACKENDS))
        raise ValueError(f"backend: expected {', '.join(others)} or {last}, got {name!r}; register_backend adds others")
    return _BACKENDS[name]


class _Scan(torch.autograd.Function):
    """A backend with a backward pass of its own."""

    @staticmethod
    def forward(ctx: Any, backend: Backend, scale: float, *given: Any) -> tuple[Tensor, Tensor]:
        operands = ScanOperands(*given)
        output, final_state, *saved = backend.run(operands, scale=scale)
        ctx.backend, ctx.scale, ctx.values = backend, scale, given[NUM_GRADIENTS + 1 :]
        ctx.save_for_backward(*given[: NUM_GRADIENTS + 1], *(saved[0] if saved else ()))
        return output, final_state

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise NotImplementedError(f"create_graph: backend {ctx.backend.name!r} has no second derivative")
        tensors, values = ctx.saved_tensors, ctx.values
        operands, saved = ScanOperands(*tensors[: NUM_GRADIENTS + 1], *values), list(tensors[NUM_GRADIENTS + 1 :])
        made = ctx.backend.backward(*grads, operands, saved, scale=ctx.scale)
        wanted = ctx.needs_input_grad[2:]
        found = (grad if asked else None for grad, asked in zip(made, wanted, strict=False))
        return None, None, *found, *(None,) * (len(wanted) - NUM_GRADIENTS)


def _expect(name: str, x: Tensor, like: Tensor) -> None:
    if (x.shape, x.dtype) != (like.shape, like.dtype):
        raise ValueError(
            f"{name}: expected {like.dtype} {list(like.shape)} of a backend, got {x.dtype} {list(x.shape)}"
        )
