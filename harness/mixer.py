"""Check a whole mixer, of the package or of your own: ``check_mixer``.

report = check_mixer({"type": "state", "num_heads": 2, "key_dim": 8, "value_dim": 8, "transition": "gla"})
report = check_mixer(lambda: MyMixer(width=32), hidden_size=32)
assert report.ok, report

A mixer of your own is a module ``mixer(hidden, state=None, *, cu_seqlens=None) -> (output, state)``, its state a
dataclass of tensors or anything with ``select(index)``. On its class it may declare

    capabilities = Capabilities(packs=False)    what it can do: statemix.mixers.Capabilities
    further_checks = (never_grows,)             functions of its own, which take the mixer and raise AssertionError;
                                                the first line of a docstring is the reason
    known_gaps = {"strides_do_not_matter": "takes dense inputs only"}

What it lacks beyond that fails by name; ``expected_failures={"name": "reason"}`` declares a gap for one call.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from pydantic import BaseModel, TypeAdapter, ValidationError
from torch import nn

from statemix.mixers import Capabilities, MixerSpec, build_mixer

from .check import Capability, Check, checks_in
from .mixer_checks import independence, initialisation, packing, precision, program, splitting, state
from .mixer_checks.checked_mixer import LOWER, CheckedMixer
from .report import HarnessError, Report
from .running import run_checks

MIXER_CHECKS = checks_in(independence, initialisation, packing, precision, program, splitting, state)

Mixerlike = nn.Module | Callable[[], nn.Module] | Mapping[str, Any] | BaseModel
Builder = Callable[[], nn.Module]


def check_mixer(
    mixer: Mixerlike,
    *,
    hidden_size: int | None = None,
    expected_failures: Mapping[str, str] | None = None,
    only: Iterable[str] | None = None,
    seed: int = 0,
    seq_len: int = 70,
    dtype: torch.dtype = torch.float64,
    include_slow: bool = False,
) -> Report:
    """Run every check that applies. The mixer itself is left alone: copies of it are checked, in eval mode.

    Args:
        mixer: a config or mapping as a recipe has it, a function that builds the mixer, or a mixer to copy.
        hidden_size: channels of its inputs; None takes those of its first linear layer, 8 a head for a config.
        expected_failures: check name -> reason for known gaps, beside those of its class; one that passes is a failure.
        only: names of the checks to run, slow ones included.
        seed: of the random weights and inputs.
        seq_len: tokens of the longest sequence; choose more than a chunk, and more than a window.
        dtype: of the exact checks; float32 for a mixer that cannot compute in float64.
        include_slow: also those checks that take long.

    Raises:
        HarnessError: nothing that can be built into a mixer, or a name that is not that of a check.
    """
    if dtype not in LOWER:
        raise HarnessError(f"dtype: expected {' or '.join(map(str, LOWER))}, got {dtype}")
    name, make, hidden_size = _subject(mixer, hidden_size)
    built = _built(make)
    subject = CheckedMixer(
        name, seed, dtype, _capabilities(built, dtype), make, hidden_size or _first_width(built), seq_len
    )
    results = run_checks(
        MIXER_CHECKS | _further_checks(built),
        subject,
        seq_len=seq_len,
        only=only,
        expected_failures={**getattr(built, "known_gaps", {}), **(expected_failures or {})},
        include_slow=include_slow,
        reproduce=partial(_call, subject),
    )
    return Report(name, results)


def _subject(mixer: Mixerlike, hidden_size: int | None) -> tuple[str, Builder, int | None]:
    """Name, builder and hidden size, if known, of what is to be checked."""
    if isinstance(mixer, nn.Module):
        return type(mixer).__name__, lambda: copy.deepcopy(mixer), hidden_size
    if isinstance(mixer, Mapping | BaseModel):
        return _configured(mixer, hidden_size)
    if not callable(mixer):
        raise HarnessError(f"mixer: expected a module, a function that builds one or a config, got {mixer!r}")
    return getattr(mixer, "__name__", type(mixer).__name__), mixer, hidden_size


def _configured(config: Mapping[str, Any] | BaseModel, hidden_size: int | None) -> tuple[str, Builder, int]:
    try:
        valid: Any = TypeAdapter(MixerSpec).validate_python(config)
    except ValidationError as error:
        raise HarnessError(f"mixer: expected the config of a mixer, got {config!r}: {error}") from error
    hidden_size = hidden_size or 8 * getattr(valid, "num_heads", 1)
    fields = dict(config) if isinstance(config, Mapping) else config.model_dump()
    return repr(fields), partial(build_mixer, valid, hidden_size=hidden_size), hidden_size


def _built(make: Builder) -> nn.Module:
    try:
        with torch.random.fork_rng():
            built = make()
    except Exception as error:
        raise HarnessError(f"mixer: expected a function that builds a mixer, it raised {error!r}") from error
    if not isinstance(built, nn.Module):
        raise HarnessError(f"mixer: expected a function that builds a torch.nn.Module, got {type(built).__name__}")
    return built


def _first_width(mixer: nn.Module) -> int:
    for module in mixer.modules():
        if isinstance(module, nn.Linear):
            return module.in_features
    raise HarnessError("hidden_size: expected the number of channels of the mixer's inputs, got None and no nn.Linear")


def _capabilities(mixer: nn.Module, dtype: torch.dtype) -> frozenset[Capability]:
    declared: Capabilities = getattr(mixer, "capabilities", Capabilities())
    has: dict[Capability, bool] = {
        "float64": dtype == torch.float64,
        "is_causal": declared.is_causal,
        "packs": declared.packs and declared.is_causal,
        "refuses_packing": not declared.packs,
        "has_constant_state": declared.has_constant_state,
    }
    return frozenset(name for name in has if has[name])


def _further_checks(mixer: nn.Module) -> dict[str, Check]:
    """The functions that the class of a mixer declares; each gets the mixer as the exact checks run it."""
    further: Iterable[Callable[[nn.Module], None]] = getattr(mixer, "further_checks", ())

    def on_module(function: Callable[[nn.Module], None]) -> Callable[[CheckedMixer], None]:
        return lambda checked: function(checked.probe().mixer)

    reasons = {f: (f.__doc__ or "declared by the mixer").strip().splitlines()[0] for f in further}
    checks = (Check(f.__name__, reason, on_module(f), depends_on_length=False) for f, reason in reasons.items())
    return {check.name: check for check in checks}


def _call(mixer: CheckedMixer, check: str) -> str:
    dtype = "" if mixer.dtype == torch.float64 else f"dtype={mixer.dtype}, "
    sizes = f"hidden_size={mixer.hidden_size}, seed={mixer.seed}, seq_len={mixer.seq_len}"
    return f"check_mixer({mixer.name}, {sizes}, {dtype}only=[{check!r}])"
