"""Checks of parameters: where they start, that all of them start there and learn, and that a state dict holds them."""

from typing import Any

import torch
from torch import Tensor, nn

from statemix.harness.check import CheckFailure, check
from statemix.mixers import RMSNorm
from statemix.transitions import Transition, TransitionModule

from .checked_mixer import CheckedMixer

STUCK = 1e-6  # a decay this close to 0 or 1 keeps no token, or never forgets one, within any context in use
NORMS = (RMSNorm, nn.RMSNorm, nn.LayerNorm, nn.GroupNorm)


@check("reset_parameters draws every parameter and buffer anew: none keeps what was in memory", depends_on_length=False)
def reset_reaches_everything(mixer: CheckedMixer) -> None:
    module = mixer.fresh()
    _poison(module)
    _reset(module, mixer.seed)
    mixer.expect_finite(_tensors(module))


@check("one seed gives one initialisation, another seed another", depends_on_length=False)
def seeds_decide_the_parameters(mixer: CheckedMixer) -> None:
    module, drawn = mixer.fresh(), []
    for seed in (mixer.seed, mixer.seed, mixer.seed + 1):
        _reset(module, seed)
        drawn.append({name: x.detach().clone() for name, x in _tensors(module).items()})
    mixer.expect_equal(drawn[1], drawn[0])
    for name, x in module.named_parameters():
        is_matrix = x.ndim > 1 and bool((x != x.flatten()[0]).any())
        if is_matrix and torch.equal(drawn[2][name], drawn[0][name]):
            raise CheckFailure(f"{name}: expected other values under another seed, got the same")


@check(
    "built on the meta device, given memory and reset, it is the mixer a normal build gives", depends_on_length=False
)
def meta_device_is_safe(mixer: CheckedMixer) -> None:
    normal = mixer.fresh()
    with torch.device("meta"):
        late = mixer.fresh().to("meta")
    late.to_empty(device=next(normal.parameters()).device)
    _poison(late)
    for module in (normal, late):
        _reset(module, mixer.seed)
    mixer.expect_equal(_tensors(late), _tensors(normal))
    hidden = mixer.probe(torch.float32).hidden()
    with torch.no_grad():
        mixer.expect_equal({"output": late(hidden)[0]}, {"output": normal(hidden)[0]})
    for (name, x), y in zip(normal.named_parameters(), late.parameters(), strict=True):
        if vars(x) != vars(y):
            raise CheckFailure(f"{name}: expected the attributes {vars(x)}, got {vars(y)} after to_empty")


@check("norms start with weight 1 and bias 0", depends_on_length=False)
def norms_start_neutral(mixer: CheckedMixer) -> None:
    for name, norm in mixer.fresh().named_modules():
        if isinstance(norm, NORMS):
            for field, start in (("weight", 1.0), ("bias", 0.0)):
                x = getattr(norm, field, None)
                if x is not None and not bool((x == start).all()):
                    raise CheckFailure(
                        f"{name}.{field}: expected {start:g} everywhere, got {x.flatten()[0].item():.3g}"
                    )


@check("at initialisation no gate is stuck at 0 or 1 for all tokens", depends_on_length=False)
def decays_start_between_0_and_1(mixer: CheckedMixer) -> None:
    module, decays = mixer.fresh(), list[Tensor]()
    for part in module.modules():
        if isinstance(part, TransitionModule):
            part.register_forward_hook(lambda part, arguments, output: decays.extend(_decay(output[0])))
    hidden = 3 * mixer.probe(torch.float32).hidden()
    with torch.no_grad():
        module(hidden)
    for decay in decays:
        for stuck, word in ((decay < STUCK, "0"), (decay > 1 - STUCK, "1")):
            always = stuck.flatten(0, 1).all(0)  # [HV] or [HV, K]
            if always.any():
                head = always.nonzero()[0].tolist()
                raise CheckFailure(f"decay of head {head[0]}: expected room between 0 and 1, got {word} for all tokens")


@check("every parameter gets a gradient: none is left out of the output", depends_on_length=False)
def every_parameter_gets_a_gradient(mixer: CheckedMixer) -> None:
    probe = mixer.probe()
    output = probe.run(probe.hidden(seq_len=2 * mixer.seq_len), [mixer.seq_len] * 2)[0]
    grads = probe.differentiate({"output": output}, {})
    mixer.expect_finite(grads)
    for name, grad in grads.items():
        if not grad.any():
            raise CheckFailure(f"{name}: expected a gradient, got 0 everywhere")


@check("a state dict holds all there is: loaded into another build it gives the same bits", depends_on_length=False)
def state_dict_holds_everything(mixer: CheckedMixer) -> None:
    source, target = mixer.fresh(), mixer.fresh(mixer.seed + 1)
    target.load_state_dict(source.state_dict())
    hidden = mixer.probe(torch.float32).hidden()
    with torch.no_grad():
        mixer.expect_equal({"output": target(hidden)[0]}, {"output": source(hidden)[0]})


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


@torch.no_grad()
def _poison(module: nn.Module) -> None:
    """Fill parameters and buffers with what no initialisation would choose."""
    for tensor in _tensors(module).values():
        tensor.fill_(torch.nan if tensor.is_floating_point() else 85)


def _reset(module: nn.Module, seed: int) -> None:
    reset: Any = getattr(module, "reset_parameters", None)
    if reset is None:
        raise CheckFailure("expected a method reset_parameters() that draws everything anew; to_empty needs it")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        reset()


def _decay(transition: Transition) -> list[Tensor]:
    """The decay of each token, [B, T, HV] or [B, T, HV, K]; nothing where it is constant or no normal form shows it."""
    try:
        log_decay = transition.lower().log_decay
    except NotImplementedError:
        return []
    return [] if log_decay is None or log_decay.ndim < 3 else [log_decay.exp()]
