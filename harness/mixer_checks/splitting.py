"""Checks of a sequence given in parts: tokens, segments and gradients must not notice where it was cut."""

from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from statemix.harness.check import CheckFailure, check

from .checked_mixer import BATCH, CheckedMixer, Probe
from .states import can_select

LONGEST_PROMPT = 3  # with the usual convolution of four, shorter than what it looks back on


@check("the output is [B, T, hidden_size] in the dtype of the input, and the state can select sequences")
def signature_is_kept(mixer: CheckedMixer) -> None:
    probe = mixer.probe()
    hidden = probe.hidden()
    output, state = probe.call(hidden)
    if not isinstance(output, Tensor) or output.shape != hidden.shape or output.dtype != hidden.dtype:
        got = f"{list(output.shape)} {output.dtype}" if isinstance(output, Tensor) else type(output).__name__
        raise CheckFailure(f"output: expected {list(hidden.shape)} {hidden.dtype}, got {got}")
    if "is_causal" not in mixer.capabilities:
        return
    if not can_select(state):
        expected = "a dataclass of tensors or a method select(index)"
        raise CheckFailure(f"state: expected {expected}, got {type(state).__name__} without one")
    again = probe.call(hidden, state)[0]
    if again.shape != hidden.shape:
        raise CheckFailure(f"output after a state: expected {list(hidden.shape)}, got {list(again.shape)}")


@check(
    "one token at a time gives what the whole sequence gives: training and decoding are one function",
    needs=["is_causal"],
)
def steps_equal_forward(mixer: CheckedMixer) -> None:
    _expect_no_seam(mixer, [1] * mixer.seq_len)


@check("cutting a sequence anywhere changes nothing, be the first part shorter than a convolution", needs=["is_causal"])
def splits_equal_forward(mixer: CheckedMixer) -> None:
    seq_len, third = mixer.seq_len, mixer.seq_len // 3
    prompts = [[n, seq_len - n] for n in range(1, LONGEST_PROMPT + 1)]
    middles = [[seq_len // 2, seq_len - seq_len // 2], [seq_len - 1, 1], [third, 1, seq_len - third - 1]]
    fours = [4] * (seq_len // 4) + [seq_len % 4] * (seq_len % 4 > 0)
    for sizes in [*prompts, *middles, fours]:
        if min(sizes) > 0:
            _expect_no_seam(mixer, sizes)


@check(
    "several new tokens beside a state give what one at a time gives: chunked prefill, drafts to verify",
    needs=["is_causal"],
)
def several_new_tokens_equal_single_ones(mixer: CheckedMixer) -> None:
    single = partial(_outputs, sizes=[mixer.seq_len, 1, 1, 1])
    for sizes in ([3], [2, 1], [1, 2]):
        mixer.expect_equivalent(partial(_outputs, sizes=[mixer.seq_len, *sizes]), single)


@check("gradients flow through the returned state: three segments give what one long run gives", needs=["is_causal"])
def gradients_cross_the_state(mixer: CheckedMixer) -> None:
    seq_len, third = mixer.seq_len, max(mixer.seq_len // 3, 1)
    for sizes in ([1, 2, seq_len - 3], [2, 1, seq_len - 3], [third, third, seq_len - 2 * third]):
        if sizes[-1] > 0:
            mixer.expect_equivalent(partial(_gradients, sizes=sizes), partial(_gradients, sizes=[seq_len]))


def _expect_no_seam(mixer: CheckedMixer, sizes: list[int]) -> None:
    """Outputs for parts of the given sizes are those of one call."""
    try:
        mixer.expect_equivalent(partial(_outputs, sizes=sizes), partial(_outputs, sizes=[mixer.seq_len]))
    except CheckFailure as failure:
        cuts = list(accumulate(sizes[:-1]))
        where = (
            "after every token" if len(cuts) == mixer.seq_len - 1 else f"before token {', '.join(map(str, cuts[:4]))}"
        )
        raise CheckFailure(f"{failure}, cut {where}") from None


def _outputs(probe: Probe, *, sizes: list[int]) -> dict[str, Tensor]:
    with torch.no_grad():
        return {"output": probe.run(probe.hidden(BATCH, sum(sizes)), sizes)[0]}


def _gradients(probe: Probe, *, sizes: list[int]) -> dict[str, Tensor]:
    hidden = probe.hidden(BATCH, sum(sizes)).requires_grad_()
    return probe.differentiate({"output": probe.run(hidden, sizes)[0]}, {"hidden": hidden})
