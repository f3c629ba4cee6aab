"""What the checks of a mixer work with: the mixer in any precision, its inputs, and comparisons within an allowance.

The same weights and inputs are run in a high precision and in a low one; how far the low one is off says how far two
orders of computation may differ in the high one (allowance.py). Weights are not left as they are initialised: there
biases are zero, norms are one and projections tiny, and much could go wrong unseen.

Shapes: B batch, T time.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .allowance import Excess, Reference
from .context import CheckFailure, describe, random_weights

BATCH = 2
CANCELLED = 8.0  # roundings of the largest entry that a sum of a few cancelling terms may leave
LOWER = {torch.float64: torch.float32, torch.float32: torch.bfloat16}


@dataclass(frozen=True)
class Probe:
    """A mixer in one precision. Inputs are the same values in every precision, up to rounding."""

    mixer: nn.Module
    hidden_size: int
    dtype: torch.dtype
    seed: int

    @property
    def device(self) -> torch.device:
        return next((x.device for x in self.mixer.parameters()), torch.device("cpu"))

    def hidden(self, batch: int, seq_len: int, *, draw: int = 0) -> Tensor:
        """Hidden states [batch, seq_len, hidden_size]; another ``draw`` gives others."""
        generator = torch.Generator().manual_seed(self.seed + 1000 * draw)
        x = torch.randn(batch, seq_len, self.hidden_size, generator=generator, dtype=torch.float64)
        return x.to(self.device, self.dtype)

    def call(self, hidden: Tensor, state: Any = None, *, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Any]:
        """Output and state of one call; ``cu_seqlens`` is passed on where there are any."""
        packing = {} if cu_seqlens is None else {"cu_seqlens": cu_seqlens}
        result = self.mixer(hidden, state, **packing)
        if not isinstance(result, tuple) or len(result) != 2:
            raise CheckFailure(f"forward: expected a pair (output, state), got {type(result).__name__}")
        return result

    def run(self, hidden: Tensor, sizes: Iterable[int] | None = None, state: Any = None) -> tuple[Tensor, Any]:
        """Output and state after ``hidden``, given in parts of the given ``sizes``, by default in one."""
        outputs = []
        for part in hidden.split(list(sizes) if sizes is not None else hidden.shape[1], dim=1):
            output, state = self.call(part, state)
            outputs.append(output)
        return torch.cat(outputs, dim=1), state

    def differentiate(self, outputs: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gradients of inputs and parameters for a fixed random loss on ``outputs``."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        loss = torch.stack([(x * random_weights(x, generator).to(x.device)).sum() for x in outputs.values()]).sum()
        named = {**inputs, **dict(self.mixer.named_parameters())}
        grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True, materialize_grads=True)
        return {f"d {name}": grad for name, grad in zip(named, grads, strict=True)}


Run = Callable[[Probe], dict[str, Tensor]]


@dataclass(frozen=True)
class MixerContext:
    """A mixer under check.

    Attributes:
        name: what reports call it.
        make: builds it anew, with whatever initialisation it has.
        hidden_size: channels of its inputs and outputs.
        seed: of weights and inputs.
        dtype: the high precision, float64 or float32.
    """

    name: str
    make: Callable[[], nn.Module]
    hidden_size: int
    seed: int
    dtype: torch.dtype

    def fresh(self, seed: int | None = None) -> nn.Module:
        """The mixer as it is built under a seed; torch's own generator is left as it was."""
        with torch.random.fork_rng():
            torch.manual_seed(self.seed if seed is None else seed)
            return self.make().eval()

    def probe(self, dtype: torch.dtype | None = None) -> Probe:
        """The mixer with weights drawn for checking, in ``dtype``, by default the high precision."""
        dtype = dtype or self.dtype
        mixer = self.fresh().double()
        stir(mixer, torch.Generator().manual_seed(self.seed))
        return Probe(mixer.to(dtype), self.hidden_size, dtype, self.seed)

    def expect(self, got: Run, want: Run) -> None:
        """Two ways to compute one thing agree in the high precision, as closely as ``want`` in the low one allows."""
        high, low = self.probe(), self.probe(LOWER[self.dtype])
        expect_close(got(high), want(high), want(low))


def expect_close(got: Mapping[str, Tensor], want: Mapping[str, Tensor], low: Mapping[str, Tensor]) -> None:
    """Every tensor of ``got`` lies within its allowance around ``want``.

    What is zero because terms cancel, as the gradient of a softmax over one key, may be as large as their rounding.
    """
    largest = max((float(x.detach().abs().max()) for x in want.values() if x.numel()), default=0.0)
    for name, x in got.items():
        excess = Reference(want[name].detach().double(), low[name].detach()).excess(x.detach())
        if excess is not None and not excess.error <= CANCELLED * torch.finfo(x.dtype).eps * largest:
            raise CheckFailure(f"{name}{place(name, excess.row)}: {describe(excess)}")


def expect_same_bits(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> None:
    """Equal bit for bit: for one call made twice, and for zeros; ``context.expect_equal`` says why for nothing else."""
    for name, x in got.items():
        y = want[name]
        if x.shape != y.shape:
            raise CheckFailure(f"{name}: expected shape {list(y.shape)}, got {list(x.shape)}")
        if not torch.equal(x, y):
            first = (x != y).nonzero()[0].tolist()
            gap = Excess(tuple(first[: max(x.ndim - 1, 1)]), (x.double() - y.double()).abs().max().item(), 0.0, "")
            raise CheckFailure(f"{name}{place(name, gap.row)}: expected equal bit for bit, differs by {gap.error:.3g}")


def expect_finite(values: Mapping[str, Tensor]) -> None:
    for name, x in values.items():
        bad = ~x.isfinite()
        if bad.any():
            row = tuple(bad.nonzero()[0].tolist()[: max(x.ndim - 1, 1)])
            raise CheckFailure(f"{name}{place(name, row)}: expected finite values, got {x[bad][0].item()}")


def place(name: str, row: Sequence[int]) -> str:
    """A row in words: [batch 1, token 17] of outputs and hidden states, plain indices of parameters and states."""
    if not row:
        return ""
    if len(row) == 2 and any(word in name for word in ("output", "hidden")):
        return f"[batch {row[0]}, token {row[1]}]"
    return f"[{', '.join(map(str, row))}]"


def state_tensors(state: Any, name: str = "state") -> dict[str, Tensor]:
    """Every tensor inside a state, by name: of fields, mappings and sequences, however nested."""
    if isinstance(state, Tensor):
        return {name: state}
    if isinstance(state, Mapping):
        parts = [(f"{name}[{key!r}]", value) for key, value in state.items()]
    elif isinstance(state, tuple | list):
        parts = [(f"{name}[{i}]", value) for i, value in enumerate(state)]
    elif is_dataclass(state):
        parts = [(f"{name}.{field.name}", getattr(state, field.name)) for field in fields(state)]
    else:
        parts = [(f"{name}.{key}", value) for key, value in getattr(state, "__dict__", {}).items()]
    return {inner: tensor for part, value in parts for inner, tensor in state_tensors(value, part).items()}


@torch.no_grad()
def stir(mixer: nn.Module, generator: torch.Generator) -> None:
    """Draw weights that hide nothing: projections of ordinary size, every other parameter moved off its start."""
    projections = {id(module.weight) for module in mixer.modules() if isinstance(module, nn.Linear)}
    for parameter in mixer.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.device)
        if id(parameter) in projections:
            parameter.copy_(noise / parameter.shape[-1] ** 0.5)
        else:
            parameter.copy_(torch.where(parameter == 0, 0.3 * noise, parameter * (1 + 0.1 * noise)))


def copy_of(mixer: nn.Module) -> Callable[[], nn.Module]:
    """A function that builds a mixer by copying one."""
    return lambda: copy.deepcopy(mixer)
