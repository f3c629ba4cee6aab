"""What is checked of a mixer: the module in any precision, its inputs, and whether two ways to compute one thing agree.

The same weights and inputs are run in a high precision and in a low one; how far the low one is off says how far two
orders of computation may differ in the high one (allowance.py). Weights are not left as they are initialised: there
biases are zero, norms are one and projections tiny, and much could go wrong unseen.

Shapes: B batch, T time.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from statemix.harness.check import CheckFailure
from statemix.harness.context import Context, gradients

BATCH = 2
LOWER = {torch.float64: torch.float32, torch.float32: torch.bfloat16}


@dataclass(frozen=True)
class Probe:
    """A mixer in one precision. Inputs are the same values in every precision, up to rounding."""

    mixer: nn.Module
    hidden_size: int
    seq_len: int
    dtype: torch.dtype
    seed: int

    @property
    def device(self) -> torch.device:
        return next((x.device for x in self.mixer.parameters()), torch.device("cpu"))

    def hidden(self, batch: int = BATCH, seq_len: int | None = None, *, draw: int = 0) -> Tensor:
        """Hidden states [batch, seq_len, hidden_size]; another ``draw`` gives others."""
        generator = torch.Generator().manual_seed(self.seed + 1000 * draw)
        x = torch.randn(batch, seq_len or self.seq_len, self.hidden_size, generator=generator, dtype=torch.float64)
        return x.to(self.device, self.dtype)

    def call(self, hidden: Tensor, state: Any = None, *, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Any]:
        """Output and state of one call; ``cu_seqlens`` is passed on where there are any."""
        packing = {} if cu_seqlens is None else {"cu_seqlens": cu_seqlens}
        result = self.mixer(hidden, state, **packing)
        if not isinstance(result, tuple) or len(result) != 2:
            raise CheckFailure(f"forward: expected a pair (output, state), got {type(result).__name__}")
        return result

    def run(self, hidden: Tensor, sizes: Iterable[int] | None = None, state: Any = None) -> tuple[Tensor, Any]:
        """Output and state after ``hidden`` in parts of ``sizes`` tokens, by default in one."""
        outputs = []
        for part in hidden.split(list(sizes) if sizes is not None else hidden.shape[1], dim=1):
            output, state = self.call(part, state)
            outputs.append(output)
        return torch.cat(outputs, dim=1), state

    def two_calls(self, *, autocast: bool = False) -> tuple[dict[str, Tensor], Any]:
        """Output and gradients of a call and of one more token after it, and the state that is left.

        The backward pass is outside autocast.
        """
        hidden = self.hidden(seq_len=self.seq_len + 1).requires_grad_()
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=autocast):
            output, state = self.run(hidden, [self.seq_len, 1])
        return {"output": output} | self.differentiate({"output": output}, {"hidden": hidden}), state

    def differentiate(self, outputs: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gradients of inputs and parameters for a fixed random loss on ``outputs``."""
        return gradients(outputs.values(), {**inputs, **self.parameters()}, seed=self.seed + 1)

    def parameters(self) -> dict[str, Tensor]:
        return dict(self.mixer.named_parameters())


Run = Callable[[Probe], dict[str, Tensor]]


@dataclass(frozen=True)
class CheckedMixer(Context):
    """A mixer under check.

    Attributes:
        make: builds it anew, with whatever initialisation it has.
        hidden_size: channels of its inputs and outputs.
        seq_len: tokens of its sequences.
    """

    make: Callable[[], nn.Module]
    hidden_size: int
    seq_len: int

    cancelled: ClassVar[float] = 8.0  # as in the gradient of a softmax over one key

    def with_length(self, seq_len: int) -> Self:
        return replace(self, seq_len=seq_len)

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
        return Probe(mixer.to(dtype), self.hidden_size, self.seq_len, dtype, self.seed)

    def expect_equivalent(self, run: Run, reference: Run) -> None:
        """Two ways to compute one thing agree in the high precision, as ``reference`` in the low one allows."""
        high, low = self.probe(), self.probe(LOWER[self.dtype])
        self.expect_close(run(high), reference(high), reference(low))

    def place(self, name: str, index: Sequence[int]) -> str:
        """[batch 1, token 17] of outputs and hidden states, plain indices of parameters and states."""
        if not index:
            return ""
        if len(index) == 2 and any(word in name for word in ("output", "hidden")):
            return f"[batch {index[0]}, token {index[1]}]"
        return f"[{', '.join(map(str, index))}]"


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
