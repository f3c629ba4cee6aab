"""Checks of what must not matter: the future, the other sequences of a batch, the layout in memory."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from statemix.harness.check import CheckFailure, check
from statemix.harness.context import first
from statemix.harness.memory import every_second, transposed

from .checked_mixer import BATCH, CheckedMixer, Probe


@check("changing the future changes neither outputs nor gradients of the past, bit for bit", needs=["is_causal"])
def future_does_not_leak(mixer: CheckedMixer) -> None:
    probe, seq_len = mixer.probe(), mixer.seq_len
    hidden, other = probe.hidden(), 3 * probe.hidden(draw=1)
    for present in sorted({max(seq_len // 6, 1), seq_len // 2, seq_len - 1} - {0, seq_len}):
        changed = torch.cat([hidden[:, :present], other[:, present:]], dim=1)
        expected, _ = _past(probe, hidden, present)
        got, future = _past(probe, changed, present)
        mixer.expect_equal(got, expected)
        if future.any():
            batch, token = first(future)
            where = mixer.place("hidden", [batch, present + token])
            raise CheckFailure(f"d hidden{where}: expected 0 for a loss on tokens before {present}")


@check("sequences of a batch do not see each other: changing one leaves the others, permuting permutes")
def batch_rows_are_independent(mixer: CheckedMixer) -> None:
    probe = mixer.probe()
    hidden = probe.hidden()
    changed = torch.cat([hidden[:1], 3 * probe.hidden(BATCH - 1, draw=1)])
    mixer.expect_equal(_first_sequence(probe, changed), _first_sequence(probe, hidden))
    mixer.expect_equivalent(partial(_in_order, order=[2, 0, 1]), partial(_in_order, order=[0, 1, 2]))


@check("transposed, sliced and expanded inputs, and upstream gradients that are views, change nothing")
def strides_do_not_matter(mixer: CheckedMixer) -> None:
    for layout, sequences in ((transposed, BATCH), (every_second, BATCH), (expanded, 1)):
        run = partial(_laid_out, sequences=sequences)
        try:
            mixer.expect_equivalent(partial(run, layout=layout), partial(run, layout=_contiguous))
        except CheckFailure as failure:
            raise CheckFailure(f"{failure}, hidden states {layout.__name__.replace('_', ' ')}") from None


def _past(probe: Probe, hidden: Tensor, present: int) -> tuple[dict[str, Tensor], Tensor]:
    """Outputs before ``present`` and gradients of a loss on them; the gradient of later hidden states apart."""
    hidden = hidden.clone().requires_grad_()
    output = probe.run(hidden)[0][:, :present]
    grads = probe.differentiate({"output": output}, {"hidden": hidden})
    past, future = grads["d hidden"].split([present, hidden.shape[1] - present], dim=1)
    return {"output": output} | grads | {"d hidden": past}, future


def _first_sequence(probe: Probe, hidden: Tensor) -> dict[str, Tensor]:
    """Output of the first sequence, and the gradients of a loss on it."""
    hidden = hidden.clone().requires_grad_()
    output = probe.run(hidden)[0][:1]
    return {"output": output} | probe.differentiate({"output": output}, {"hidden": hidden})


def _in_order(probe: Probe, *, order: list[int]) -> dict[str, Tensor]:
    """Outputs of a batch in some order, put back in the first one."""
    with torch.no_grad():
        output = probe.run(probe.hidden(len(order))[order])[0]
    return {"output": output[torch.tensor(order).argsort()]}


def _laid_out(probe: Probe, *, sequences: int, layout: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Outputs and gradients for inputs in some layout; what comes down to the output are views as well."""
    hidden = probe.hidden(sequences).requires_grad_()
    output = probe.run(layout(hidden))[0]
    joined = torch.cat([output, 2 * output], dim=-1).transpose(0, 1)
    return {"output": output} | probe.differentiate({"joined": joined, "sum": output.sum(1)}, {"hidden": hidden})


def _contiguous(x: Tensor) -> Tensor:
    return x.expand(BATCH, -1, -1).clone(memory_format=torch.contiguous_format)


def expanded(x: Tensor) -> Tensor:
    """One sequence that serves as the whole batch, once in memory."""
    return x.expand(BATCH, -1, -1)
