"""A mixer from outside the package: what its class declares decides which checks it gets, and it brings its own."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from statemix.harness import check_mixer
from statemix.harness.mixer import MIXER_CHECKS
from statemix.mixers import Capabilities

HIDDEN = 6


@dataclass(frozen=True)
class Memory:
    """A vector for each sequence, [B, hidden_size]; nothing but the tensor."""

    vector: Tensor


def never_grows(mixer: Any) -> None:
    """the state is an average of projected inputs

    So it is no larger than the largest of them.
    """
    hidden = torch.randn(1, 9, HIDDEN, dtype=torch.float64)
    assert (mixer(hidden)[1].vector.abs() <= mixer.project(hidden).abs().amax(1)).all(), "the state grew"


class Diagonal(nn.Module):
    """h_t = a h_{t-1} + (1 - a) W x_t, a fixed decay for every channel."""

    capabilities = Capabilities(packs=False, has_constant_state=True)
    further_checks = (never_grows,)

    def __init__(self, gain: float = 1.0) -> None:
        super().__init__()
        self.project, self.gain = nn.Linear(HIDDEN, HIDDEN, bias=False), gain
        self.log_rate = nn.Parameter(torch.empty(HIDDEN))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.project.reset_parameters()
        nn.init.uniform_(self.log_rate, -2.0, 0.0)

    def state_bytes(self, seq_len: int, dtype: torch.dtype = torch.float32) -> int:
        return HIDDEN * dtype.itemsize

    def forward(self, hidden: Tensor, state: Memory | None = None) -> tuple[Tensor, Memory]:
        decay = torch.exp(-self.log_rate.exp())
        vector = hidden.new_zeros(len(hidden), HIDDEN) if state is None else state.vector
        if len(vector) != len(hidden):
            raise ValueError(f"state: expected {len(hidden)} sequences, got {len(vector)}")
        outputs = []
        for x in self.project(hidden).unbind(1):
            vector = decay * vector + (1 - decay) * self.gain * x
            outputs.append(vector)
        return torch.stack(outputs, dim=1), Memory(vector)


def names(mixer: Any, **options: Any) -> set[str]:
    report = check_mixer(mixer, hidden_size=HIDDEN, seq_len=7, **options)
    assert report.ok, f"\n{report}"
    return {result.check for result in report.results}


def test_a_mixer_with_a_vector_for_a_state_and_no_packing_passes_what_concerns_it() -> None:
    packing = {name for name, check in MIXER_CHECKS.items() if "packs" in check.needs}
    assert len(packing) == 4
    assert names(Diagonal) == MIXER_CHECKS.keys() - packing - {"compiled_equals_eager"} | {"never_grows"}


def test_a_check_that_a_mixer_brings_fails_by_its_name_and_runs_alone() -> None:
    report = check_mixer(lambda: Diagonal(gain=100.0), hidden_size=HIDDEN, seq_len=7, only=["never_grows"])
    [(name, message)] = report.failures
    assert name == "never_grows" and "the state grew" in message
    assert report.results[0].reason == "the state is an average of projected inputs"
    assert "only=['never_grows']" in str(report)


def test_a_mixer_that_sees_the_future_is_left_alone_about_it_and_about_states() -> None:
    class Average(nn.Linear):
        capabilities = Capabilities(is_causal=False, packs=False)

        def forward(self, hidden: Tensor, state: None = None) -> Any:
            return super().forward(hidden - hidden.mean(1, keepdim=True)), None

    checked = names(lambda: Average(HIDDEN, HIDDEN, bias=False))
    assert {name for name, check in MIXER_CHECKS.items() if "is_causal" in check.needs}.isdisjoint(checked)
    assert {"batch_rows_are_independent", "strides_do_not_matter", "packing_is_refused"} <= checked


def test_a_gap_that_a_class_declares_is_expected_and_its_mending_is_a_failure() -> None:
    class NotYet(Diagonal):
        known_gaps = {"states_of_another_batch_are_refused": "broadcasts", "steps_equal_forward": "not derived yet"}

        def forward(self, hidden: Tensor, state: Memory | None = None) -> tuple[Tensor, Memory]:
            return super().forward(hidden, None if state is None else Memory(state.vector.expand(len(hidden), -1)))

    report = check_mixer(NotYet, hidden_size=HIDDEN, seq_len=7, only=NotYet.known_gaps)
    outcomes = {result.check: result.outcome for result in report.results}
    assert outcomes == {
        "states_of_another_batch_are_refused": "expected failure",
        "steps_equal_forward": "unexpected pass",
    }


@pytest.mark.parametrize("missing", ["capabilities", "further_checks", "known_gaps"])
def test_a_plain_mixer_that_declares_nothing_gets_every_check_that_could_apply(missing: str) -> None:
    class Plain(nn.Linear):
        def forward(self, hidden: Tensor, state: Any = None) -> Any:
            return super().forward(hidden), None

    assert not hasattr(Plain, missing)
    report = check_mixer(lambda: Plain(HIDDEN, HIDDEN), seq_len=5)
    undeclared = {"packing_is_refused", "state_size_is_constant", "compiled_equals_eager"}
    assert {result.check for result in report.results} == MIXER_CHECKS.keys() - undeclared
