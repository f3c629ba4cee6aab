"""Checks of precisions: a module computes in the one it is cast to, and low ones cost what rounding costs."""

from collections.abc import Callable

import torch
from torch import Tensor

from statemix.harness.check import CheckFailure, check

from .checked_mixer import CheckedMixer, Probe
from .rounding import expect_within_rounding

STEP = 1e-4  # its square, the error of a central difference, and eps / STEP are both far below a gradient
ADVICE = "; if the mixer cannot compute in float64, check it with dtype=torch.float32"


@check("a float64 module computes in float64: a cast inside would blind the exact checks", needs=["float64"])
def float64_is_kept(mixer: CheckedMixer) -> None:
    """The response to a step of 1e-8 is twice that to half the step; float32 has no digits left to show it."""
    probe = mixer.probe()
    hidden, step = probe.hidden(), 1e-8 * probe.hidden(draw=1)
    try:
        with torch.no_grad():
            base, half, full = (probe.run(hidden + size * step)[0] for size in (0.0, 0.5, 1.0))
    except RuntimeError as error:
        raise CheckFailure(f"{str(error).splitlines()[0]}{ADVICE}") from None
    bend = (full - base - 2 * (half - base)).norm() / (full - base).norm()
    if not bend < 0.01:  # 1e-6 in float64, about 1 with a cast to float32
        raise CheckFailure(f"output: steps of 1e-8 and 0.5e-8 give responses that differ by {bend:.1g}{ADVICE}")


@check("autograd gives the derivative that small steps measure, for the input and each parameter", needs=["float64"])
def gradients_are_derivatives(mixer: CheckedMixer) -> None:
    """Along one random direction a tensor. Steps of two sizes say how far their differences can be trusted."""
    probe = mixer.probe()
    seq_len = min(mixer.seq_len, 5)
    hidden = probe.hidden(seq_len=seq_len + 1).requires_grad_()
    weight = probe.hidden(seq_len=seq_len + 1, draw=1)

    def terms() -> Tensor:
        return probe.run(hidden, [seq_len, 1])[0] * weight

    leaves = {"hidden": hidden, **probe.parameters()}
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


@check("a float32 module is as close to float64 as rounding to float32 allows, gradients too", needs=["float64"])
def float32_is_close(mixer: CheckedMixer) -> None:
    _expect_low_precision(mixer, torch.float32)


@check("a bfloat16 module is as close as rounding to bfloat16 allows, gradients and a carried state too")
def bfloat16_is_close(mixer: CheckedMixer) -> None:
    _expect_low_precision(mixer, torch.bfloat16)


@check("autocast with the backward pass outside it: float32 gradients, as close as rounding to bfloat16 allows")
def autocast_is_close(mixer: CheckedMixer) -> None:
    got = mixer.probe(torch.float32).two_calls(autocast=True)[0]
    for name, x in got.items():
        if name.startswith("d ") and x.dtype != torch.float32:
            raise CheckFailure(f"{name}: expected a gradient in torch.float32, got {x.dtype}")
    mixer.expect_finite(got)
    expect_within_rounding(mixer, got, _two_calls, torch.bfloat16)


def _expect_low_precision(mixer: CheckedMixer, dtype: torch.dtype) -> None:
    got = _two_calls(mixer.probe(dtype))
    for name, x in got.items():
        if x.dtype != dtype:
            raise CheckFailure(f"{name}: expected {dtype}, got {x.dtype}")
    mixer.expect_finite(got)
    expect_within_rounding(mixer, got, _two_calls, dtype)


def _two_calls(probe: Probe) -> dict[str, Tensor]:
    return probe.two_calls()[0]
