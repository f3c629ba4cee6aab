"""Checks of the program around the maths: gradients that nobody asks for, and compilation."""

from functools import partial

import torch
from torch import Tensor

from .context import CheckFailure
from .mixer_check import mixer_check
from .mixer_context import BATCH, MixerContext, Probe, expect_same_bits


@mixer_check("no_grad, inference_mode, frozen parameters and a single trained one all run")
def partial_gradients_run(context: MixerContext, seq_len: int) -> None:
    probe = context.probe()
    hidden = probe.hidden(BATCH, seq_len)
    want = {"output": probe.run(hidden)[0].detach()}
    for guard in (torch.no_grad, torch.inference_mode):
        with guard():
            output, state = probe.run(hidden)
            probe.run(hidden[:, :1], state=state)
        expect_same_bits({"output": output}, want)
    leaves = {"hidden": hidden, **dict(probe.mixer.named_parameters())}
    for trained in leaves:
        _expect_single_gradient(probe, leaves, trained)


@mixer_check(
    "torch.compile traces the mixer whole and gives what the eager run gives", depends_on_length=False, is_slow=True
)
def compiled_equals_eager(context: MixerContext, seq_len: int) -> None:
    def run(probe: Probe, *, is_compiled: bool) -> dict[str, Tensor]:
        if is_compiled:
            probe.mixer.compile(backend="aot_eager", fullgraph=True)
        hidden = probe.hidden(BATCH, seq_len + 1).requires_grad_()
        output = probe.run(hidden, [seq_len, 1])[0]
        return {"output": output} | probe.differentiate({"output": output}, {"hidden": hidden})

    torch._dynamo.reset()
    context.expect(partial(run, is_compiled=True), partial(run, is_compiled=False))


def _expect_single_gradient(probe: Probe, leaves: dict[str, Tensor], trained: str) -> None:
    for name, x in leaves.items():
        x.requires_grad_(name == trained).grad = None
    output = probe.run(leaves["hidden"])[0]
    if not output.requires_grad:
        raise CheckFailure(f"{trained}: expected a gradient, but the output does not depend on it")
    output.sum().backward()
    given = [name for name, x in leaves.items() if x.grad is not None]
    if given != [trained]:
        raise CheckFailure(f"expected a gradient for {trained} alone, got one for {', '.join(given) or 'nothing'}")
