"""Checks of what must not matter: the future, the other sequences of a batch, the layout in memory."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from .context import CheckFailure
from .mixer_check import mixer_check
from .mixer_context import BATCH, MixerContext, Probe, expect_same_bits, place


@mixer_check("changing the future changes neither outputs nor gradients of the past, bit for bit")
def future_does_not_leak(context: MixerContext, seq_len: int) -> None:
    probe = context.probe()
    for present in sorted({max(seq_len // 6, 1), seq_len // 2, seq_len - 1} - {0, seq_len}):
        hidden, other = probe.hidden(BATCH, seq_len), 3 * probe.hidden(BATCH, seq_len, draw=1)
        changed = torch.cat([hidden[:, :present], other[:, present:]], dim=1)
        want, _ = _past(probe, hidden, present)
        got, future = _past(probe, changed, present)
        expect_same_bits(got, want)
        if future.any():
            row = (int(future.nonzero()[0][0]), present + int(future.nonzero()[0][1]))
            raise CheckFailure(f"d hidden{place('hidden', row)}: expected 0 for a loss on tokens before {present}")


@mixer_check("sequences of a batch do not see each other: changing one leaves the others, permuting permutes")
def batch_rows_are_independent(context: MixerContext, seq_len: int) -> None:
    probe = context.probe()
    hidden = probe.hidden(BATCH, seq_len)
    changed = torch.cat([hidden[:1], 3 * probe.hidden(BATCH - 1, seq_len, draw=1)])
    want, got = (_row(probe, x) for x in (hidden, changed))
    expect_same_bits(got, want)

    run = partial(_in_order, seq_len=seq_len)
    context.expect(partial(run, order=[2, 0, 1]), partial(run, order=[0, 1, 2]))


@mixer_check("transposed, sliced and expanded inputs, and upstream gradients that are views, change nothing")
def strides_do_not_matter(context: MixerContext, seq_len: int) -> None:
    for layout, rows in ((_transposed, BATCH), (_every_second, BATCH), (_expanded, 1)):
        run = partial(_laid_out, seq_len=seq_len, rows=rows)
        try:
            context.expect(partial(run, layout=layout), partial(run, layout=_contiguous))
        except CheckFailure as failure:
            raise CheckFailure(f"{failure}, hidden states {layout.__name__.strip('_').replace('_', ' ')}") from None


def _past(probe: Probe, hidden: Tensor, present: int) -> tuple[dict[str, Tensor], Tensor]:
    """Outputs before ``present`` and gradients of a loss on them; the gradient of later hidden states apart."""
    hidden = hidden.clone().requires_grad_()
    output = probe.run(hidden)[0][:, :present]
    grads = probe.differentiate({"output": output}, {"hidden": hidden})
    past, future = grads["d hidden"].split([present, hidden.shape[1] - present], dim=1)
    return {"output": output} | grads | {"d hidden": past}, future


def _row(probe: Probe, hidden: Tensor) -> dict[str, Tensor]:
    """Output of the first sequence, and the gradients of a loss on it."""
    hidden = hidden.clone().requires_grad_()
    output = probe.run(hidden)[0][:1]
    return {"output": output} | probe.differentiate({"output": output}, {"hidden": hidden})


def _in_order(probe: Probe, *, seq_len: int, order: list[int]) -> dict[str, Tensor]:
    """Outputs of a batch given in some order, put back in the first one."""
    with torch.no_grad():
        output = probe.run(probe.hidden(BATCH + 1, seq_len)[order])[0]
    return {"output": output[torch.tensor(order).argsort()]}


def _laid_out(probe: Probe, *, seq_len: int, rows: int, layout: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Outputs and gradients for inputs in some layout; what comes down to the output are views as well."""
    hidden = probe.hidden(rows, seq_len).requires_grad_()
    output = probe.run(layout(hidden))[0]
    joined = torch.cat([output, 2 * output], dim=-1).transpose(0, 1)
    return {"output": output} | probe.differentiate({"joined": joined, "sum": output.sum(1)}, {"hidden": hidden})


def _contiguous(x: Tensor) -> Tensor:
    return x.expand(BATCH, -1, -1).clone(memory_format=torch.contiguous_format)


def _transposed(x: Tensor) -> Tensor:
    """The same values with the first two axes swapped in memory."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def _every_second(x: Tensor) -> Tensor:
    """The same values as every second entry of the last axis of a wider tensor whose other entries are NaN."""
    return torch.stack([x, torch.full_like(x, torch.nan)], dim=-1)[..., 0]


def _expanded(x: Tensor) -> Tensor:
    """One sequence that serves as every row of the batch, once in memory."""
    return x.expand(BATCH, -1, -1)
