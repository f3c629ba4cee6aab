"""Planted faults: each broken mixer fails exactly the checks that are about it, and every check has such a mixer."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor, nn

from statemix.harness import check_mixer
from statemix.harness.mixer import MIXER_CHECKS
from statemix.mixers import Attention, AttentionState, Capabilities, MixerSpec, StateMixer
from statemix.mixers.rotary import rotate
from statemix.transitions import Product, ScalarGate, Transition

HIDDEN = 8
SEQ_LEN = 13  # longer than the window and the convolution, and than what several checks cut off
WINDOW = 5
SUB_STEPS = {"steps_equal_forward", "splits_equal_forward", "several_new_tokens_equal_single_ones"}
SPLITS = SUB_STEPS | {"gradients_cross_the_state"}
RESETS = {"reset_reaches_everything", "meta_device_is_safe"}
BITWISE = {
    "future_does_not_leak",
    "batch_rows_are_independent",
    "partial_gradients_run",
    "states_are_not_modified",
    "runs_are_repeatable",
    "unwritten_memory_is_never_read",
}
PACKED = {"packed_documents_equal_separate_ones", "packed_states_equal_separate_ones"}


class Window(Attention):
    """Attention within a window, with nothing wrong."""

    def __init__(self) -> None:
        super().__init__(Attention.Config(num_heads=2, num_kv_heads=1, window=WINDOW), hidden_size=HIDDEN)


class Gated(StateMixer):
    """Gated DeltaNet with a convolution, with nothing wrong."""

    def __init__(self) -> None:
        options = {"type": "state", "num_heads": 1, "key_dim": 4, "value_dim": 3, "conv_size": 4, "chunk_size": 16}
        config = TypeAdapter(MixerSpec).validate_python(options | {"transition": "gated_deltanet"})
        super().__init__(config, hidden_size=HIDDEN)


class ReturnsNoState(Window):
    def forward(self, hidden: Tensor, state: Any = None, *, cu_seqlens: Tensor | None = None) -> Any:
        return super().forward(hidden, state, cu_seqlens=cu_seqlens)[0]


class ForgetsItsState(Window):
    def forward(self, hidden: Tensor, state: Any = None, *, cu_seqlens: Tensor | None = None) -> Any:
        return super().forward(hidden, None, cu_seqlens=cu_seqlens)


class PrefillsOnce(Window):
    """Several tokens beside a state are taken for a new sequence."""

    def forward(self, hidden: Tensor, state: Any = None, *, cu_seqlens: Tensor | None = None) -> Any:
        if hidden.shape[1] > 1 and cu_seqlens is None:
            state = None
        return super().forward(hidden, state, cu_seqlens=cu_seqlens)


class KeepsTheWrongInputs(Gated):
    """The history of the convolution is one token too old."""

    def forward(self, hidden: Tensor, state: Any = None, *, cu_seqlens: Tensor | None = None) -> Any:
        output, after = super().forward(hidden, state, cu_seqlens=cu_seqlens)
        return output, replace(after, conv=after.conv.roll(1, dims=1))


class SeesOneLessInDecoding(Window):
    def forward(self, hidden: Tensor, state: Any = None, *, cu_seqlens: Tensor | None = None) -> Any:
        if state is not None:
            state = replace(state, length=state.length.clamp(max=WINDOW - 2))
        output, after = super().forward(hidden, state, cu_seqlens=cu_seqlens)
        return output, after


class RestartsPositions(Window):
    """Rotary positions count from the first token of each call."""

    def _mix(self, query: Tensor, key: Tensor, value: Tensor, state: AttentionState) -> Any:
        positions = torch.arange(query.shape[1])[None]
        query, key = (rotate(x, positions, base=10000.0) for x in (query, key))
        self.rotary_base = None
        return super()._mix(query, key, value, state)


class DetachesItsState(Gated):
    def forward(self, hidden: Tensor, state: Any = None, *, cu_seqlens: Tensor | None = None) -> Any:
        if state is not None:
            state = replace(state, recurrent=state.recurrent.detach())
        return super().forward(hidden, state, cu_seqlens=cu_seqlens)


class DeclaresNoConvolution(Gated):
    def state_bytes(self, seq_len: int, dtype: torch.dtype = torch.float32) -> int:
        return super().state_bytes(seq_len, dtype) - self.history * sum(self.channels) * dtype.itemsize


class KeepsAView(Window):
    def forward(self, hidden: Tensor, state: Any = None, *, cu_seqlens: Tensor | None = None) -> Any:
        output, after = super().forward(hidden, state, cu_seqlens=cu_seqlens)
        return output, replace(after, value=torch.cat([after.value, after.value])[: len(after.value)])


class ReordersKeysOnly(Window):
    def forward(self, hidden: Tensor, state: Any = None, *, cu_seqlens: Tensor | None = None) -> Any:
        output, after = super().forward(hidden, state, cu_seqlens=cu_seqlens)
        return output, HalfReordered(after.key, after.value, after.length)


class HalfReordered(AttentionState):
    def select(self, index: Any) -> "HalfReordered":
        picked = super().select(index)
        return HalfReordered(picked.key, self.value[: len(picked.value)], picked.length)


class WritesIntoItsState(Gated):
    def forward(self, hidden: Tensor, state: Any = None, *, cu_seqlens: Tensor | None = None) -> Any:
        output, after = super().forward(hidden, state, cu_seqlens=cu_seqlens)
        if state is not None and not torch.is_grad_enabled():
            state.recurrent.copy_(after.recurrent)
        return output, after


class SharesAState(Window):
    """A state of one row serves a whole batch."""

    def forward(self, hidden: Tensor, state: Any = None, *, cu_seqlens: Tensor | None = None) -> Any:
        if state is not None and len(state.length) == 1 and cu_seqlens is None:
            state = state.select([0] * len(hidden))
        return super().forward(hidden, state, cu_seqlens=cu_seqlens)


class IsNoisy(Window):
    def forward(self, hidden: Tensor, state: Any = None, *, cu_seqlens: Tensor | None = None) -> Any:
        output, after = super().forward(hidden, state, cu_seqlens=cu_seqlens)
        return output * (1 + 1e-15 * torch.randn_like(output)), after


class ReadsUnwrittenMemory(Window):
    def forward(self, hidden: Tensor, state: Any = None, *, cu_seqlens: Tensor | None = None) -> Any:
        output, after = super().forward(hidden, state, cu_seqlens=cu_seqlens)
        return output + torch.empty_like(output).isnan(), after


class AnchorsInTheFuture(Window):
    """Rescaled by the largest entry of the sequence: right but for rounding, which the future decides."""

    def forward(self, hidden: Tensor, state: Any = None, *, cu_seqlens: Tensor | None = None) -> Any:
        anchor = hidden.detach().abs().amax(dim=(1, 2), keepdim=True)
        return super().forward(hidden / anchor * anchor, state, cu_seqlens=cu_seqlens)


class MixesTheBatch(Window):
    def forward(self, hidden: Tensor, state: Any = None, *, cu_seqlens: Tensor | None = None) -> Any:
        return super().forward(hidden - 1e-3 * hidden.mean(0), state, cu_seqlens=cu_seqlens)


class AssumesDenseInput(Window):
    def forward(self, hidden: Tensor, state: Any = None, *, cu_seqlens: Tensor | None = None) -> Any:
        batch, seq_len, size = hidden.shape
        dense = hidden.as_strided(hidden.shape, (seq_len * size, size, 1)) if hidden.stride(-1) > 1 else hidden
        return super().forward(dense, state, cu_seqlens=cu_seqlens)


class ConvolvesAcrossDocuments(Gated):
    def __init__(self) -> None:
        super().__init__()
        self.convolution.register_forward_hook(self._filter_again, with_kwargs=True)

    def _filter_again(self, module: nn.Module, given: Any, options: Any, made: Any) -> Any:
        return made if options["cu_seqlens"] is None else (module(given[0], None, cu_seqlens=None)[0], made[1])


class GivesDocumentsEachOthersState(Window):
    def forward(self, hidden: Tensor, state: Any = None, *, cu_seqlens: Tensor | None = None) -> Any:
        output, after = super().forward(hidden, state, cu_seqlens=cu_seqlens)
        order = list(range(len(after.length)))
        return output, after.select(order if cu_seqlens is None else order[::-1])


class HasABias(Window):
    """Tokens of no document come out as the bias."""

    def __init__(self) -> None:
        super().__init__()
        self.output = nn.Linear(self.output.in_features, HIDDEN)


class GrowsItsState(Window):
    """Keeps what its window shows, and declares a state of constant size."""

    capabilities = Capabilities(has_constant_state=True)


class ReadsDocumentsAsOne(Window):
    """Declares that it does not pack, and takes packed documents all the same."""

    capabilities = Capabilities(packs=False)

    def forward(self, hidden: Tensor, state: Any = None, *, cu_seqlens: Tensor | None = None) -> Any:
        return super().forward(hidden, state)


class PacksABatch(Window):
    def forward(self, hidden: Tensor, state: Any = None, *, cu_seqlens: Tensor | None = None) -> Any:
        return super().forward(hidden, state, cu_seqlens=cu_seqlens if len(hidden) == 1 else None)


class KnowsNoDocuments(nn.Module):
    """A mixer of someone's own: a running mean. Nothing but the call and the state's select."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden: Tensor, state: Any = None) -> Any:
        total = self.project(hidden).cumsum(1)
        count = torch.arange(1, hidden.shape[1] + 1).expand(len(hidden), -1)[..., None]
        if state is not None:
            if len(state.total) != len(hidden):
                raise ValueError(f"state: expected {len(hidden)} rows, got {len(state.total)}")
            total, count = total + state.total, count + state.count
        return total / count, Mean(total[:, -1:].clone(), count[:, -1:].clone())


class Mean:
    def __init__(self, total: Tensor, count: Tensor) -> None:
        self.total, self.count = total, count

    def select(self, index: Any) -> "Mean":
        return Mean(self.total[index], self.count[index])


class CastsToFloat32(Window):
    def forward(self, hidden: Tensor, state: Any = None, *, cu_seqlens: Tensor | None = None) -> Any:
        return super().forward(hidden.float().to(hidden), state, cu_seqlens=cu_seqlens)


class LosesAGradient(Gated):
    def forward(self, hidden: Tensor, state: Any = None, *, cu_seqlens: Tensor | None = None) -> Any:
        output, after = super().forward(hidden, state, cu_seqlens=cu_seqlens)
        return output * (1 + hidden.detach().tanh()), after


class CutsItsInput(Window):
    """Inputs cut to bfloat16 in a float32 module."""

    def forward(self, hidden: Tensor, state: Any = None, *, cu_seqlens: Tensor | None = None) -> Any:
        if hidden.dtype == torch.float32:
            hidden = hidden.bfloat16().float()
        return super().forward(hidden, state, cu_seqlens=cu_seqlens)


class KeepsDecaysInBfloat16(Gated):
    def __init__(self) -> None:
        super().__init__()
        self.transition.register_forward_hook(lambda module, arguments, made: (_coarse(made[0]), made[1]))


def _coarse(transition: Transition) -> Transition:
    assert isinstance(transition, Product)
    gate = transition.left
    assert isinstance(gate, ScalarGate)
    if gate.log_decay.dtype == torch.float64:
        return transition
    return Product(ScalarGate(gate.log_decay.exp().bfloat16().float().log()), transition.right)


class AnswersInFloat32(Window):
    def forward(self, hidden: Tensor, state: Any = None, *, cu_seqlens: Tensor | None = None) -> Any:
        output, after = super().forward(hidden, state, cu_seqlens=cu_seqlens)
        return output.to(torch.promote_types(output.dtype, torch.float32)), after


class CountsInBfloat16(Attention):
    """Rotary positions in the dtype of the keys."""

    def __init__(self) -> None:
        super().__init__(Attention.Config(num_heads=2), hidden_size=HIDDEN)

    def _mix(self, query: Tensor, key: Tensor, value: Tensor, state: AttentionState) -> Any:
        position = state.length[:, None] + torch.arange(query.shape[1])
        error = position.to(query.dtype).double() - position
        query, key = (rotate(x, error, base=10000.0) for x in (query, key))
        return super()._mix(query, key, value, state)


class JoinsTwoPrecisions(Window):
    """Joins what autocast made with something in the dtype of the input."""

    def forward(self, hidden: Tensor, state: Any = None, *, cu_seqlens: Tensor | None = None) -> Any:
        output, after = super().forward(hidden, state, cu_seqlens=cu_seqlens)
        return torch.lerp(output, torch.zeros_like(hidden), 0.0), after


class ForgetsToReset(Gated):
    def reset_parameters(self, *, init_std: float = 0.02, output_scale: float = 1.0) -> None:
        norm, self.norm = self.norm, nn.Identity()
        super().reset_parameters(init_std=init_std, output_scale=output_scale)
        self.norm = norm


class SeedsItself(Window):
    def reset_parameters(self, *, init_std: float = 0.02, output_scale: float = 1.0) -> None:
        torch.manual_seed(3)
        super().reset_parameters(init_std=init_std, output_scale=output_scale)


class MarksOnce(Window):
    """A mark set where the module is built does not survive to_empty."""

    def __init__(self) -> None:
        super().__init__()
        self.query.weight.no_weight_decay = True  # type: ignore[attr-defined]


class StartsSilent(Gated):
    def reset_parameters(self, *, init_std: float = 0.02, output_scale: float = 1.0) -> None:
        super().reset_parameters(init_std=init_std, output_scale=output_scale)
        assert self.norm is not None
        nn.init.zeros_(self.norm.weight)


class NeverForgets(Gated):
    def reset_parameters(self, *, init_std: float = 0.02, output_scale: float = 1.0) -> None:
        super().reset_parameters(init_std=init_std, output_scale=output_scale)
        nn.init.constant_(self.transition.get_parameter("factors.0.decay.dt_bias"), -30.0)


class HasAnIdleParameter(Window):
    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Parameter(torch.ones(3))


class HidesABuffer(Window):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("secret", torch.rand(HIDDEN), persistent=False)

    def reset_parameters(self, *, init_std: float = 0.02, output_scale: float = 1.0) -> None:
        super().reset_parameters(init_std=init_std, output_scale=output_scale)
        if hasattr(self, "secret"):
            self.secret.uniform_()

    def forward(self, hidden: Tensor, state: Any = None, *, cu_seqlens: Tensor | None = None) -> Any:
        return super().forward(hidden * self.secret, state, cu_seqlens=cu_seqlens)


class ReadsValues(Window):
    def forward(self, hidden: Tensor, state: Any = None, *, cu_seqlens: Tensor | None = None) -> Any:
        if hidden.isnan().any():
            raise ValueError("hidden: expected numbers")
        return super().forward(hidden, state, cu_seqlens=cu_seqlens)


FAULTS: dict[type[nn.Module], set[str]] = {
    ReturnsNoState: {"signature_is_kept"},
    ForgetsItsState: SPLITS | {"declared_state_size", "states_of_another_batch_are_refused"},
    PrefillsOnce: SPLITS - {"steps_equal_forward"} | {"packed_documents_equal_separate_ones", "declared_state_size"},
    KeepsTheWrongInputs: SPLITS | {"packed_states_equal_separate_ones"},
    SeesOneLessInDecoding: SPLITS,
    RestartsPositions: SPLITS,
    DetachesItsState: {"gradients_cross_the_state", "gradients_are_derivatives"},
    DeclaresNoConvolution: {"declared_state_size"},
    KeepsAView: {"states_own_their_memory"},
    ReordersKeysOnly: PACKED | {"select_picks_rows"},
    WritesIntoItsState: {"states_are_not_modified"},
    SharesAState: {"states_of_another_batch_are_refused"},
    IsNoisy: BITWISE,
    ReadsUnwrittenMemory: {"unwritten_memory_is_never_read"},
    AnchorsInTheFuture: {"future_does_not_leak"},
    MixesTheBatch: {"batch_rows_are_independent", "select_picks_rows"},
    AssumesDenseInput: {"strides_do_not_matter"},
    ConvolvesAcrossDocuments: PACKED,
    GivesDocumentsEachOthersState: {"packed_states_equal_separate_ones"},
    HasABias: {"tokens_of_no_document_give_zeros", *RESETS},
    PacksABatch: {"packing_a_batch_is_refused"},
    GrowsItsState: {"state_size_is_constant"},
    ReadsDocumentsAsOne: {"packing_is_refused"},
    CastsToFloat32: {"float64_is_kept"},
    LosesAGradient: {"gradients_are_derivatives"},
    CutsItsInput: {"float32_is_close"},
    KeepsDecaysInBfloat16: {"float32_is_close"},
    AnswersInFloat32: {"bfloat16_is_close"},
    JoinsTwoPrecisions: {"autocast_is_close"},
    ForgetsToReset: RESETS,
    SeedsItself: {"seeds_decide_the_parameters"},
    MarksOnce: {"meta_device_is_safe"},
    StartsSilent: {"norms_start_neutral"},
    NeverForgets: {"decays_start_between_0_and_1"},
    HasAnIdleParameter: {"every_parameter_gets_a_gradient", "partial_gradients_run", *RESETS},
    HidesABuffer: {"state_dict_holds_everything"},
    ReadsValues: {"compiled_equals_eager"},
}


@pytest.mark.parametrize("mixer", FAULTS)
def test_a_broken_mixer_fails_the_checks_that_are_about_it(mixer: type[nn.Module]) -> None:
    report = check_mixer(mixer, hidden_size=HIDDEN, seq_len=SEQ_LEN, only=FAULTS[mixer])
    assert {check for check, _ in report.failures} == FAULTS[mixer], report


@pytest.mark.slow
@pytest.mark.parametrize("mixer", [x for x in FAULTS if x not in (ReturnsNoState, ReadsUnwrittenMemory)])
def test_a_broken_mixer_fails_no_other_check(mixer: type[nn.Module]) -> None:
    """But for those without a state, which fail nearly all, and with chance contents, which may fail any."""
    others = MIXER_CHECKS.keys() - FAULTS[mixer] - {"compiled_equals_eager"}
    report = check_mixer(mixer, hidden_size=HIDDEN, seq_len=SEQ_LEN, only=others)
    assert report.ok, report


@pytest.mark.parametrize("mixer", [Window, Gated])
def test_the_mixers_that_the_faults_are_planted_in_pass(mixer: type[nn.Module]) -> None:
    report = check_mixer(mixer, hidden_size=HIDDEN, seq_len=SEQ_LEN)
    assert report.ok, report


def test_every_check_catches_a_fault() -> None:
    assert set().union(*FAULTS.values()) == MIXER_CHECKS.keys()


def test_positions_in_bfloat16_are_seen_in_a_long_sequence() -> None:
    """Above 256 bfloat16 holds every second integer only."""
    long, short = (
        check_mixer(CountsInBfloat16, hidden_size=HIDDEN, seq_len=seq_len, only=["bfloat16_is_close"])
        for seq_len in (300, 30)
    )
    assert not long.ok and short.ok


def test_what_a_mixer_of_ones_own_lacks_fails_by_name_and_can_be_declared() -> None:
    lacks = {check: "no reset_parameters" for check in (*RESETS, "seeds_decide_the_parameters")}
    lacks |= {check: "no cu_seqlens" for check in (*PACKED, "tokens_of_no_document_give_zeros")}
    lacks |= {"packing_a_batch_is_refused": "no cu_seqlens", "declared_state_size": "no state_bytes"}
    report = check_mixer(KnowsNoDocuments, seq_len=SEQ_LEN)
    assert {check for check, _ in report.failures} == lacks.keys(), report
    messages = dict(report.failures)
    assert "expected a method reset_parameters()" in messages["meta_device_is_safe"]
    assert "expected a method state_bytes(seq_len) -> int" in messages["declared_state_size"]
    assert "unexpected keyword argument 'cu_seqlens'" in messages["packed_documents_equal_separate_ones"]
    assert check_mixer(KnowsNoDocuments, seq_len=SEQ_LEN, expected_failures=lacks).ok
