"""Checks of precisions: a module computes in the one it is cast to, and low ones cost what rounding costs."""

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor

from .context import CheckFailure
from .mixer_check import mixer_check
from .mixer_context import BATCH, MixerContext, Probe, expect_finite
from .rounding import expect_within_rounding

STEP = 1e-4  # its square, the error of a central difference, and eps / STEP are both far below a gradient
ADVICE = "; if the mixer cannot compute in float64, check it with dtype=torch.float32"


@mixer_check("a float64 module computes in float64: a cast inside would blind the exact checks", needs_float64=True)
def float64_is_kept(context: MixerContext, seq_len: int) -> None:
    """The response to a step of 1e-8 is twice that to half the step; float32 has no digits left to show it."""
    probe = context.probe()
    hidden, step = probe.hidden(BATCH, seq_len), 1e-8 * probe.hidden(BATCH, seq_len, draw=1)
    try:
        with torch.no_grad():
            base, half, full = (probe.run(hidden + size * step)[0] for size in (0.0, 0.5, 1.0))
    except RuntimeError as error:
        raise CheckFailure(f"{str(error).splitlines()[0]}{ADVICE}") from None
    bend = (full - base - 2 * (half - base)).norm() / (full - base).norm()
    if not bend < 0.01:  # 1e-6 in float64, about 1 with a cast to float32
        raise CheckFailure(f"output: steps of 1e-8 and 0.5e-8 give responses that differ by {bend:.1g}{ADVICE}")


@mixer_check(
    "autograd gives the derivative that small steps measure, for the input and each parameter", needs_float64=True
)
def gradients_are_derivatives(context: MixerContext, seq_len: int) -> None:
    """Along one random direction a tensor. Steps of two sizes say how far their differences can be trusted."""
    probe = context.probe()
    hidden = probe.hidden(BATCH, min(seq_len, 5) + 1).requires_grad_()
    weight = probe.hidden(BATCH, hidden.shape[1], draw=1)

    def terms() -> Tensor:
        return probe.run(hidden, [hidden.shape[1] - 1, 1])[0] * weight

    leaves = {"hidden": hidden, **dict(probe.mixer.named_parameters())}
    grads = torch.autograd.grad(terms().sum(), list(leaves.values()), allow_unused=True, materialize_grads=True)
    generator = torch.Generator().manual_seed(probe.seed + 2)
    for (name, x), grad in zip(leaves.items(), grads, strict=True):
        direction = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.device)
        wide, narrow = (_difference(terms, x, step * direction) / step for step in (2 * STEP, STEP))
        got = (grad * direction).sum()
        rounding = torch.finfo(torch.float64).eps / STEP * terms().abs().sum()
        allowed = 4 * ((wide - narrow).abs() + rounding)
        if not (got - narrow).abs() <= allowed:
            raise CheckFailure(f"d {name}: {got:.6g} by autograd, {narrow:.6g} by steps, allowed {allowed:.1g} apart")


@torch.no_grad()
def _difference(terms: Callable[[], Tensor], x: Tensor, step: Tensor) -> Tensor:
    """Half of what the sum of ``terms`` gains from x - step to x + step."""
    start, sums = x.detach().clone(), []
    for moved in (start - step, start + step):
        x.copy_(moved)
        sums.append(terms())
    x.copy_(start)
    return (sums[1] - sums[0]).sum() / 2


@mixer_check("a float32 module is as close to float64 as rounding to float32 allows, gradients too", needs_float64=True)
def float32_is_close(context: MixerContext, seq_len: int) -> None:
    _expect_low_precision(context, seq_len, torch.float32)


@mixer_check("a bfloat16 module is as close as rounding to bfloat16 allows, gradients and a carried state too")
def bfloat16_is_close(context: MixerContext, seq_len: int) -> None:
    _expect_low_precision(context, seq_len, torch.bfloat16)


@mixer_check("autocast with the backward pass outside it: float32 gradients, as close as rounding to bfloat16 allows")
def autocast_is_close(context: MixerContext, seq_len: int) -> None:
    probe = context.probe(torch.float32)
    got = _two_calls(probe, seq_len, autocast=True)
    for name, x in got.items():
        if name.startswith("d ") and x.dtype != torch.float32:
            raise CheckFailure(f"{name}: expected a gradient in torch.float32, got {x.dtype}")
    expect_finite(got)
    expect_within_rounding(context, got, lambda p: _two_calls(p, seq_len), torch.bfloat16)


def _expect_low_precision(context: MixerContext, seq_len: int, dtype: torch.dtype) -> None:
    got = _two_calls(context.probe(dtype), seq_len)
    for name, x in got.items():
        if x.dtype != dtype:
            raise CheckFailure(f"{name}: expected {dtype}, got {x.dtype}")
    expect_finite(got)
    expect_within_rounding(context, got, lambda probe: _two_calls(probe, seq_len), dtype)


def _two_calls(probe: Probe, seq_len: int, *, autocast: bool = False) -> dict[str, Tensor]:
    """Output and gradients of a call and of one more token after it; the backward pass is outside autocast."""
    hidden = probe.hidden(BATCH, seq_len + 1).requires_grad_()
    guard = torch.autocast(probe.device.type, dtype=torch.bfloat16) if autocast else contextlib.nullcontext()
    with guard:
        output = probe.run(hidden, [seq_len, 1])[0]
    return {"output": output} | probe.differentiate({"output": output}, {"hidden": hidden})
