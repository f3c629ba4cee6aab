"""Checks of the program around the maths: gradients that nobody asks for, and compilation."""

from functools import partial

import torch
from torch import Tensor

from statemix.harness.check import check
from statemix.harness.context import expect_single_gradient

from .checked_mixer import CheckedMixer, Probe


@check("no_grad, inference_mode, frozen parameters and a single trained one all run")
def partial_gradients_run(mixer: CheckedMixer) -> None:
    probe = mixer.probe()
    hidden = probe.hidden()
    expected = {"output": probe.run(hidden)[0].detach()}
    for guard in (torch.no_grad, torch.inference_mode):
        with guard():
            output, state = probe.run(hidden)
            probe.run(hidden[:, :1], state=state)
        mixer.expect_equal({"output": output}, expected)
    leaves = {"hidden": hidden, **probe.parameters()}
    for trained in leaves:
        expect_single_gradient(trained, leaves, lambda: [probe.run(hidden)[0]])


@check("torch.compile traces the mixer whole and gives what the eager run gives", depends_on_length=False, is_slow=True)
def compiled_equals_eager(mixer: CheckedMixer) -> None:
    def run(probe: Probe, *, is_compiled: bool) -> dict[str, Tensor]:
        if is_compiled:
            probe.mixer.compile(backend="aot_eager", fullgraph=True)
        return probe.two_calls()[0]

    torch._dynamo.reset()
    mixer.expect_equivalent(partial(run, is_compiled=True), partial(run, is_compiled=False))
