"""The mixers of the package pass every check of a whole mixer, and what ``check_mixer`` says about one that fails."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from statemix.harness import HarnessError, check_mixer
from statemix.harness.mixer import MIXER_CHECKS
from statemix.mixers import Attention, StateMixer

SEQ_LEN = 37  # three chunks of 16 with a ragged end, several windows

STATE = {"type": "state", "num_heads": 2, "key_dim": 6, "value_dim": 5, "chunk_size": 16}
CONVOLUTION = {"conv_size": 4, "conv_bias": True}
GROUPED = {"num_value_heads": 4}
TWO_BLOCKS = {"type": "block_diagonal", "inner": "gated_deltanet", "blocks": 2}
ATTENTION = {"type": "attention", "num_heads": 2}

MIXERS: dict[str, dict[str, Any]] = {
    "linear_attention": STATE | {"transition": "linear_attention", "key_norm": "none"},
    "retnet": STATE | GROUPED | {"transition": "retnet"},
    "mamba2": STATE | CONVOLUTION | {"transition": "mamba2", "value_map": "silu", "output_gate": "silu"},
    "gla": STATE | {"transition": "gla", "output_gate": "sigmoid"},
    "deltanet": STATE | CONVOLUTION | {"transition": "deltanet", "output_norm": "none"},
    "deltaproduct": STATE | GROUPED | {"transition": "deltaproduct"},
    "gated_deltanet": STATE | CONVOLUTION | GROUPED | {"transition": "gated_deltanet", "output_gate": "silu"},
    "gated_deltaproduct": STATE | {"transition": "gated_deltaproduct", "conv_size": 2},
    "kda": STATE | GROUPED | {"transition": "kda", "feature_map": "identity"},
    "block_diagonal": STATE | CONVOLUTION | {"transition": TWO_BLOCKS},
    "attention": ATTENTION,
    "grouped_attention": ATTENTION | {"num_kv_heads": 1, "head_dim": 4},
    "window_attention": ATTENTION | {"window": 5},
    "window_attention_without_rotary": ATTENTION | {"window": 30, "rotary": False},
}


@pytest.fixture(autouse=True)
def _first_exp() -> None:
    torch.zeros(4).exp()  # the first vectorised exp of a process can be slightly off on some CPUs


@pytest.mark.parametrize("name", MIXERS)
def test_the_mixers_of_the_package_pass_every_check(name: str) -> None:
    report = check_mixer(MIXERS[name], hidden_size=20, seq_len=SEQ_LEN)
    assert report.ok, report
    left_out = {"packing_is_refused"} | ({"state_size_is_constant"} if "attention" in MIXERS[name]["type"] else set())
    every_check = {c.name for c in MIXER_CHECKS.values() if not c.is_slow}
    assert {result.check for result in report.results} == every_check - left_out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gated_deltanet", "gla", "attention", "window_attention"])
def test_the_mixers_of_the_package_compile(name: str) -> None:
    report = check_mixer(MIXERS[name], hidden_size=20, seq_len=SEQ_LEN, only=["compiled_equals_eager"])
    assert report.ok, report


@pytest.mark.parametrize("name", ["gated_deltanet", "window_attention"])
def test_a_mixer_can_be_checked_in_float32_alone(name: str) -> None:
    report = check_mixer(MIXERS[name], hidden_size=20, seq_len=SEQ_LEN, dtype=torch.float32)
    assert report.ok, report


def test_a_config_a_mixer_and_a_function_are_the_same_subject() -> None:
    config = Attention.Config(num_heads=2)
    ways = (config, config.model_dump(), Attention(config, hidden_size=16), lambda: Attention(config, hidden_size=16))
    for mixer in ways:
        report = check_mixer(mixer, seq_len=5, only=["steps_equal_forward", "declared_state_size"])
        assert report.ok, report
        assert len(report.results) == 2


def test_checking_a_mixer_leaves_it_and_the_random_state_alone() -> None:
    mixer = Attention(Attention.Config(num_heads=2), hidden_size=8).train()
    before, generator = {name: x.clone() for name, x in mixer.state_dict().items()}, torch.get_rng_state()
    check_mixer(mixer, seq_len=5)
    assert all(torch.equal(x, before[name]) for name, x in mixer.state_dict().items())
    assert mixer.training and all(x.grad is None and x.requires_grad for x in mixer.parameters())
    assert torch.equal(torch.get_rng_state(), generator)


class Lagging(StateMixer):
    """A state that ignores its last token, from the ninth token on."""

    def forward(self, hidden: Tensor, state: Any = None, *, cu_seqlens: Tensor | None = None) -> Any:
        output, after = super().forward(hidden, state, cu_seqlens=cu_seqlens)
        if hidden.shape[1] > 8:
            after = super().forward(hidden[:, :-1], state, cu_seqlens=cu_seqlens)[1]
        return output, after


def lagging() -> nn.Module:
    config = StateMixer.Config.model_validate(STATE | {"transition": "gla"})
    return Lagging(config, hidden_size=20)


def test_a_failure_says_what_where_by_how_much_how_short_and_how_to_see_it_again() -> None:
    report = check_mixer(lagging, seed=3, seq_len=SEQ_LEN, only=["splits_equal_forward"])
    assert [check for check, _ in report.failures] == ["splits_equal_forward"]
    (message,) = (message for _, message in report.failures)
    assert message.startswith("output[batch ") and "token 12]: error " in message and ", allowed " in message
    assert message.endswith("cut before token 12")
    (result,) = report.results
    assert result.smallest_seq_len == 13
    assert "\n  smallest failing T: 13\n" in str(report)
    call = "check_mixer(lagging, hidden_size=20, seed=3, seq_len=37, only=['splits_equal_forward'])"
    assert f"\n  reproduce: {call}\n" in str(report)
    assert eval(call).failures == report.failures


def test_a_known_gap_is_declared_and_one_that_passes_is_a_failure() -> None:
    gaps = {"splits_equal_forward": "the state lags", "steps_equal_forward": "the state lags"}
    report = check_mixer(lagging, seq_len=SEQ_LEN, only=gaps, expected_failures=gaps)
    outcomes = {result.check: result.outcome for result in report.results}
    assert outcomes == {"splits_equal_forward": "expected failure", "steps_equal_forward": "unexpected pass"}
    assert [check for check, _ in report.failures] == ["steps_equal_forward"]


@pytest.mark.parametrize(
    "names", [{"only": ["step_equals_forward"]}, {"expected_failures": {"step_equals_forward": ""}}]
)
def test_an_unknown_check_names_the_nearest(names: dict[str, Any]) -> None:
    with pytest.raises(HarnessError, match="got 'step_equals_forward'; did you mean 'steps_equal_forward'"):
        check_mixer(MIXERS["attention"], **names)


@pytest.mark.parametrize(
    ("mixer", "message"),
    [
        ({"type": "attention", "num_head": 2}, "num_head"),
        ({"type": "attention", "num_heads": 3, "rotary": False, "head_dim": 0}, "head_dim"),
        (StateMixer, "expected a function that builds a mixer, it raised TypeError"),
        (lambda: 3, "expected a function that builds a torch.nn.Module, got int"),
        (nn.Identity(), "hidden_size: expected the number of channels"),
        ("attention", "expected a module, a function that builds one or a config, got 'attention'"),
    ],
)
def test_what_cannot_be_checked_is_refused(mixer: Any, message: str) -> None:
    with pytest.raises(HarnessError, match=message):
        check_mixer(mixer)


def test_what_is_no_mixer_at_all_fails_every_check_but_does_not_stop_the_harness() -> None:
    report = check_mixer(nn.Linear(4, 4), seq_len=5, only=["signature_is_kept", "steps_equal_forward"])
    assert [check for check, _ in report.failures] == ["signature_is_kept", "steps_equal_forward"]
    assert all("TypeError: Linear.forward() takes 2 positional arguments" in message for _, message in report.failures)
