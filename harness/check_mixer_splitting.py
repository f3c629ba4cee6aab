"""Checks of a sequence given in parts: tokens, segments and gradients must not notice where it was cut."""

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
    result = probe.mixer(hidden)
    if not isinstance(result, tuple) or len(result) != 2:
        raise CheckFailure(f"forward: expected a pair (output, state), got {type(result).__name__}")
    output, state = result
    if not isinstance(output, Tensor) or output.shape != hidden.shape or output.dtype != hidden.dtype:
        got = f"{list(output.shape)} {output.dtype}" if isinstance(output, Tensor) else type(output).__name__
        raise CheckFailure(f"output: expected {list(hidden.shape)} {hidden.dtype}, got {got}")
    if not callable(getattr(state, "select", None)):
        raise CheckFailure(f"state: expected a method select(index), got {type(state).__name__} without one")
    again = probe.mixer(hidden, state)[0]
    if again.shape != hidden.shape:
        raise CheckFailure(f"output after a state: expected {list(hidden.shape)}, got {list(again.shape)}")


@mixer_check("one token at a time gives what the whole sequence gives: training and decoding are one function")
def steps_equal_forward(context: MixerContext, seq_len: int) -> None:
    _expect_no_seam(context, seq_len, [1] * seq_len)


@mixer_check("cutting a sequence anywhere changes nothing, be the first part shorter than a convolution")
def splits_equal_forward(context: MixerContext, seq_len: int) -> None:
    prompts = [[n, seq_len - n] for n in range(1, LONGEST_PROMPT + 1)]
    middles = [[seq_len // 2, seq_len - seq_len // 2], [seq_len - 1, 1], [seq_len // 3, 1, seq_len - seq_len // 3 - 1]]
    fours = [4] * (seq_len // 4) + [seq_len % 4]
    for sizes in [*prompts, *middles, fours]:
        if min(sizes[:-1]) > 0 and sizes[-1] > 0:
            _expect_no_seam(context, seq_len, sizes)


@mixer_check("several new tokens beside a state give what one at a time gives: chunked prefill, drafts to verify")
def several_new_tokens_equal_single_ones(context: MixerContext, seq_len: int) -> None:
    def continued(probe: Probe, sizes: list[int]) -> dict[str, Tensor]:
        with torch.no_grad():
            return {"output": probe.run(probe.hidden(BATCH, seq_len + 3), [seq_len, *sizes])[0]}

    for sizes in ([3], [2, 1], [1, 2]):
        context.expect(lambda probe, s=sizes: continued(probe, s), lambda probe: continued(probe, [1, 1, 1]))


@mixer_check("gradients flow through the returned state: three segments give what one long run gives")
def gradients_cross_the_state(context: MixerContext, seq_len: int) -> None:
    def run(probe: Probe, sizes: list[int]) -> dict[str, Tensor]:
        hidden = probe.hidden(BATCH, seq_len).requires_grad_()
        output = probe.run(hidden, sizes)[0]
        return probe.differentiate({"output": output}, {"hidden": hidden})

    third = max(seq_len // 3, 1)
    for sizes in ([1, 2, seq_len - 3], [2, 1, seq_len - 3], [third, third, seq_len - 2 * third]):
        if sizes[-1] > 0:
            context.expect(lambda probe, s=sizes: run(probe, s), lambda probe: run(probe, [seq_len]))


def _expect_no_seam(context: MixerContext, seq_len: int, sizes: list[int]) -> None:
    """Outputs for parts of the given sizes are those of one call."""
    try:
        context.expect(lambda probe: _outputs(probe, seq_len, sizes), lambda probe: _outputs(probe, seq_len, [seq_len]))
    except CheckFailure as failure:
        cuts = list(accumulate(sizes[:-1]))
        where = "after every token" if len(cuts) == seq_len - 1 else f"before token {', '.join(map(str, cuts[:4]))}"
        raise CheckFailure(f"{failure}, cut {where}") from None


def _outputs(probe: Probe, seq_len: int, sizes: list[int]) -> dict[str, Tensor]:
    with torch.no_grad():
        return {"output": probe.run(probe.hidden(BATCH, seq_len), sizes)[0]}
