"""Checks of a sequence given in parts: tokens, segments and gradients must not notice where it was cut."""

from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from .context import CheckFailure
from .mixer_check import mixer_check
from .mixer_context import BATCH, MixerContext, Probe

LONGEST_PROMPT = 3  # with the usual convolution of four, shorter than what it looks back on


@mixer_check("the output is [B, T, hidden_size] in the dtype of the input, and the state can select rows")
def signature_is_kept(context: MixerContext, seq_len: int) -> None:
    probe = context.probe()
    hidden = probe.hidden(BATCH, seq_len)
    output, state = probe.call(hidden)
    if not isinstance(output, Tensor) or output.shape != hidden.shape or output.dtype != hidden.dtype:
        got = f"{list(output.shape)} {output.dtype}" if isinstance(output, Tensor) else type(output).__name__
        raise CheckFailure(f"output: expected {list(hidden.shape)} {hidden.dtype}, got {got}")
    if not callable(getattr(state, "select", None)):
        raise CheckFailure(f"state: expected a method select(index), got {type(state).__name__} without one")
    again = probe.call(hidden, state)[0]
    if again.shape != hidden.shape:
        raise CheckFailure(f"output after a state: expected {list(hidden.shape)}, got {list(again.shape)}")


@mixer_check("one token at a time gives what the whole sequence gives: training and decoding are one function")
def steps_equal_forward(context: MixerContext, seq_len: int) -> None:
    _expect_no_seam(context, seq_len, [1] * seq_len)


@mixer_check("cutting a sequence anywhere changes nothing, be the first part shorter than a convolution")
def splits_equal_forward(context: MixerContext, seq_len: int) -> None:
    third = seq_len // 3
    prompts = [[n, seq_len - n] for n in range(1, LONGEST_PROMPT + 1)]
    middles = [[seq_len // 2, seq_len - seq_len // 2], [seq_len - 1, 1], [third, 1, seq_len - third - 1]]
    fours = [4] * (seq_len // 4) + [seq_len % 4] * (seq_len % 4 > 0)
    for sizes in [*prompts, *middles, fours]:
        if min(sizes) > 0:
            _expect_no_seam(context, seq_len, sizes)


@mixer_check("several new tokens beside a state give what one at a time gives: chunked prefill, drafts to verify")
def several_new_tokens_equal_single_ones(context: MixerContext, seq_len: int) -> None:
    single = partial(_outputs, sizes=[seq_len, 1, 1, 1])
    for sizes in ([3], [2, 1], [1, 2]):
        context.expect(partial(_outputs, sizes=[seq_len, *sizes]), single)


@mixer_check("gradients flow through the returned state: three segments give what one long run gives")
def gradients_cross_the_state(context: MixerContext, seq_len: int) -> None:
    third = max(seq_len // 3, 1)
    for sizes in ([1, 2, seq_len - 3], [2, 1, seq_len - 3], [third, third, seq_len - 2 * third]):
        if sizes[-1] > 0:
            context.expect(partial(_gradients, sizes=sizes), partial(_gradients, sizes=[seq_len]))


def _expect_no_seam(context: MixerContext, seq_len: int, sizes: list[int]) -> None:
    """Outputs for parts of the given sizes are those of one call."""
    try:
        context.expect(partial(_outputs, sizes=sizes), partial(_outputs, sizes=[seq_len]))
    except CheckFailure as failure:
        cuts = list(accumulate(sizes[:-1]))
        where = "after every token" if len(cuts) == seq_len - 1 else f"before token {', '.join(map(str, cuts[:4]))}"
        raise CheckFailure(f"{failure}, cut {where}") from None


def _outputs(probe: Probe, *, sizes: list[int]) -> dict[str, Tensor]:
    with torch.no_grad():
        return {"output": probe.run(probe.hidden(BATCH, sum(sizes)), sizes)[0]}


def _gradients(probe: Probe, *, sizes: list[int]) -> dict[str, Tensor]:
    hidden = probe.hidden(BATCH, sum(sizes)).requires_grad_()
    return probe.differentiate({"output": probe.run(hidden, sizes)[0]}, {"hidden": hidden})
