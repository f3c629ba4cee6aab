"""The one place where kernels start, so that a launch can be recorded and compiled ahead of time.

Under ``recording`` nothing runs: each launch is kept with its arguments, which may then be tensors on the meta device.
What a record holds is what a GPU would be given, so compiling the records of a call compiles that call.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Grid = tuple[int, ...]
IS_AMD = torch.version.hip is not None


@dataclass(frozen=True)
class Launch:
    """One launch: ``kernel[grid](*args, **options)``.

    Attributes:
        kernel: a function under ``triton.jit``.
        grid: the number of programs along each axis.
        args: tensors, numbers and None, in the order of the kernel's parameters.
        constants: its compile-time parameters by name.
        num_warps: warps a program.
        num_stages: how many iterations of a loop have their loads in flight.
        max_registers: the most that one thread may take, for more programs on a multiprocessor; None for no limit.
    """

    kernel: Any
    grid: Grid
    args: tuple[Any, ...]
    constants: dict[str, Any]
    num_warps: int
    num_stages: int
    max_registers: int | None


_recorded: ContextVar[list[Launch] | None] = ContextVar("statemix_launches", default=None)

# What the compiler made, by what it was made for; no key holds a length, so there are few. Triton finds it again as
# well, but takes longer than a short kernel runs.
_compiled: dict[tuple[Any, ...], Any] = {}


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """Collect launches in place of running them."""
    launches: list[Launch] = []
    token = _recorded.set(launches)
    try:
        yield launches
    finally:
        _recorded.reset(token)


def launch(
    kernel: Any,
    grid: Grid,
    args: tuple[Any, ...],
    constants: dict[str, Any],
    *,
    num_warps: int,
    num_stages: int,
    max_registers: int | None = None,
) -> None:
    """Run a kernel on the current device, where its tensors must be, or record that it would run.

    A grid without programs launches nothing.

    Args:
        args: the parameters that are no constants, in order. Integers must be declared as not specialised.
        constants: the compile-time parameters, which come last, by name; others are left out.
    """
    names = kernel.arg_names[len(args) :]
    values = list(map(constants.__getitem__, names))
    launches = _recorded.get()
    if launches is not None:
        launched = dict(zip(names, values, strict=True))
        launches.append(Launch(kernel, grid, args, launched, num_warps, num_stages, max_registers))
        return
    if not all(grid):
        return
    # a kernel's own hash takes a lock, that of its function nothing
    key = (kernel.fn, num_warps, num_stages, max_registers, *values, *_specialisation(args))
    compiled = _compiled.get(key)
    if compiled is not None:
        compiled[(*grid, 1, 1)[:3]](*args, *values)
        return
    limit = {} if max_registers is None else {"maxnreg": max_registers}  # an option that only NVIDIA's compiler knows
    compiled = kernel[grid](*args, *values, num_warps=num_warps, num_stages=num_stages, **limit)
    if compiled is not None:  # the interpreter makes nothing
        _compiled[key] = compiled


def _specialisation(args: tuple[Any, ...]) -> list[Any]:
    """What Triton compiles arguments for, and their device.

    Of a tensor its type, whether its address is a multiple of 16, and on AMD whether 32 bits reach over its memory; of
    an integer whether it fits 32 bits; of anything else its type. One plain loop, because every launch runs it.
    """
    kinds: list[Any] = []
    device = None
    for arg in args:
        if arg is None:
            kinds.append(None)
        elif type(arg) is int:
            kinds.append(arg >= 2**31)
        elif isinstance(arg, Tensor):
            kinds.append(arg.dtype)
            kinds.append(arg.data_ptr() % 16 == 0)
            if IS_AMD:
                kinds.append(arg.untyped_storage().size() < 2**31)
            if device is None:
                device = arg.device
        else:
            kinds.append(type(arg))
    kinds.append(device)
    return kinds
