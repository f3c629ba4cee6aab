"""What rounding costs a mixer: the low-precision reference of runs in bfloat16, float32 and under autocast.

The mixer runs in its high precision, but every parameter and what enters and leaves each innermost submodule takes a
random relative error of up to half an eps of the low precision, forward and backward. A few such runs say how far a
run in that precision may be off. It rounds in more places than these, hence MARGIN: over 250 runs of the package's
mixers the worst vector was 8 times further off in float32, 4 times in bfloat16; twice that is allowed.
"""

from typing import Any

import torch
from torch import Tensor

from statemix.harness.allowance import Excess
from statemix.harness.check import CheckFailure

from .checked_mixer import CheckedMixer, Probe, Run

DRAWS = 4
MARGIN = {torch.float32: 16.0, torch.bfloat16: 8.0}


def expect_within_rounding(mixer: CheckedMixer, got: dict[str, Tensor], run: Run, dtype: torch.dtype) -> None:
    """``got`` is ``run`` in the high precision, but for errors of the size that rounding to ``dtype`` makes."""
    exact = run(mixer.probe())
    noisy = [run(_noisy(mixer.probe(), torch.finfo(dtype).eps, draw)) for draw in range(DRAWS)]
    for name, x in got.items():
        expected = exact[name].detach().double()
        error, size = _lengths(x.detach().double() - expected), _lengths(expected)
        noise = torch.stack([_lengths(other[name].detach().double() - expected) for other in noisy]).amax(0)
        allowed = MARGIN[dtype] * (noise + torch.finfo(dtype).eps * size)
        beyond = torch.where(error.isfinite(), error - allowed, torch.inf).flatten()
        if beyond.numel() and beyond.max() > 0:
            index = torch.unravel_index(beyond.argmax(), error.shape)
            excess = Excess(tuple(map(int, index)), error[index].item(), allowed[index].item())
            raise CheckFailure(f"{name}{mixer.place(name, excess.index)}: {excess} for {dtype}")


def _lengths(x: Tensor) -> Tensor:
    """Length of each vector along the last axis; a tensor of one axis is one vector."""
    return torch.linalg.vector_norm(x, dim=-1)


class _Noise(torch.autograd.Function):
    """x (1 + eps (u - 1/2)) with u uniform in [0, 1], and the same for the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, generator: torch.Generator) -> Tensor:
        ctx.eps, ctx.generator = eps, generator
        return _disturbed(x, eps, generator)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _disturbed(gradients[0], ctx.eps, ctx.generator), None, None


def _disturbed(x: Tensor, eps: float, generator: torch.Generator) -> Tensor:
    noise = torch.rand(x.shape, generator=generator, dtype=torch.float64) - 0.5
    return x * (1 + eps * noise.to(x))


def _noisy(probe: Probe, eps: float, draw: int) -> Probe:
    """The probe with noise on its parameters, and before and behind every submodule that has no submodules."""
    generator = torch.Generator().manual_seed(probe.seed + 7000 + draw)

    def disturb(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(map(disturb, x))
        is_real = isinstance(x, Tensor) and x.is_floating_point()
        return _Noise.apply(x, eps, generator) if is_real else x  # type: ignore[no-untyped-call]

    with torch.no_grad():
        for parameter in probe.mixer.parameters():
            parameter.copy_(_disturbed(parameter, eps, generator))
    for module in probe.mixer.modules():
        if module is not probe.mixer and not list(module.children()):
            module.register_forward_pre_hook(lambda module, arguments: disturb(arguments))
            module.register_forward_hook(lambda module, arguments, output: disturb(output))
    return probe
