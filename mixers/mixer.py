"""What every sequence mixer is, and the mixers that a recipe can name.

    y, state = mixer(hidden, state)            hidden, y [B, T, hidden_size], a state from the tokens before

Shapes: B batch, T time, N packed documents.
"""

import inspect
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn

from statemix.plugins import PartConfig, Registry

from .capabilities import Capabilities
from .state import MixerState


class Mixer(nn.Module):
    """Base of the mixers, made as ``cls(config, hidden_size=..., norm_eps=...)``.

    Attributes:
        formula: the recurrence in words, which ``statemix show`` prints; by default the first line of the docstring.
        capabilities: what it can do; ``statemix.harness`` runs the checks of that.
        known_gaps: name of a check of ``statemix.harness`` -> why this mixer does not meet it.
        further_checks: what else must hold; each gets the mixer in float64 and raises AssertionError, its name and the
            first line of its docstring are those of the check.
    """

    Config: ClassVar[type[PartConfig]]
    formula: str = ""
    capabilities: ClassVar[Capabilities] = Capabilities()
    known_gaps: ClassVar[Mapping[str, str]] = {}
    further_checks: ClassVar[Sequence[Callable[[Any], None]]] = ()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "formula" not in vars(cls):
            cls.formula = inspect.cleandoc(cls.__doc__ or cls.__name__).splitlines()[0].removesuffix(".")

    @abstractmethod
    def forward(
        self, hidden: Tensor, state: Any = None, *, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, MixerState]:
        """Mix ``hidden`` [B, T, hidden_size] along T, after the tokens that ``state`` has seen.

        Args:
            hidden: new tokens.
            state: what this layer returned for the tokens before; None starts afresh.
            cu_seqlens: offsets of packed documents, int32 [N + 1], B = 1; the state then has N rows.

        Returns:
            y [B, T, hidden_size], zeros after the last document, and the next state.

        Raises:
            StateError: a state of another layer or batch.
            ValueError: cu_seqlens of a wrong form.
        """

    def reset_parameters(self, *, init_std: float = 0.02, output_scale: float = 1.0) -> None:
        """Draw all parameters anew, also after ``to_empty``.

        Here: linear layers normal(0, init_std), that called ``output`` times output_scale; other parts as they say
        themselves. A mixer with parameters of its own says how they start.
        """
        if next(self.parameters(recurse=False), None) is not None:
            raise NotImplementedError(
                f"{type(self).__name__}: expected a method reset_parameters for its own parameters"
            )
        for name, part in self.named_children():
            if isinstance(part, nn.Linear):
                nn.init.normal_(part.weight, std=init_std * (output_scale if name == "output" else 1.0))
                if part.bias is not None:
                    nn.init.zeros_(part.bias)
            elif next(part.parameters(), None) is not None:
                part.reset_parameters()  # type: ignore[operator]

    def empty_state(self, rows: int, like: Tensor) -> MixerState:
        """The state of ``rows`` sequences before their first token, with the dtype and device of ``like``."""
        raise NotImplementedError(f"{type(self).__name__}: expected a method empty_state or state_bytes; write either")

    def state_bytes(self, seq_len: int, dtype: torch.dtype = torch.float32) -> int:
        """Bytes of the state of one sequence after ``seq_len`` tokens; here those of the empty state."""
        return self.empty_state(1, torch.empty(0, dtype=dtype, device="meta")).nbytes

    def kernel(self, seq_len: int, device: torch.device) -> str:
        """What runs the mixer in training on ``device``; a mixer on meta can answer too."""
        return "torch"


MIXERS: Registry[Mixer] = Registry("mixer", methods=("reset_parameters", "state_bytes", "kernel"))
MixerSpec = Annotated[PartConfig, MIXERS]


def build_mixer(config: PartConfig, *, hidden_size: int, norm_eps: float = 1e-5) -> Mixer:
    """The mixer that ``config`` describes, for hidden states of ``hidden_size`` channels."""
    return MIXERS.class_of(config)(config, hidden_size=hidden_size, norm_eps=norm_eps)
