"""Check a whole mixer, of the package or of your own: ``check_mixer``.

report = check_mixer({"type": "state", "num_heads": 2, "key_dim": 8, "value_dim": 8, "transition": "gla"})
report = check_mixer(lambda: MyMixer(width=32), hidden_size=32)
assert report.ok, report

A mixer of your own is a module ``mixer(hidden, state=None, *, cu_seqlens=None) -> (output, state)`` whose states have
``select(index)``. What it lacks fails by name, and is declared with ``expected_failures={"name": "reason"}``.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from torch import nn

from statemix.mixers import Attention, MixerSpec, StateMixer, build_mixer

from . import (  # noqa: F401  (register)
    check_mixer_independence,
    check_mixer_initialisation,
    check_mixer_packing,
    check_mixer_precision,
    check_mixer_program,
    check_mixer_splitting,
    check_mixer_state,
)
from .mixer_check import MIXER_CHECKS
from .mixer_context import LOWER, MixerContext, copy_of
from .report import HarnessError, Report
from .running import expect_known, run_check

Config = StateMixer.Config | Attention.Config
Mixerlike = nn.Module | Callable[[], nn.Module] | Mapping[str, Any] | Config


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
        expected_failures: check name -> reason for known gaps; one that passes is a failure.
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
    expected = dict(expected_failures or {})
    selected = None if only is None else list(only)
    for name in [*expected, *(selected or [])]:
        expect_known(name, MIXER_CHECKS)
    name, make, hidden_size = _subject(mixer, hidden_size)
    context = MixerContext(name, make, hidden_size, seed, dtype)
    results = [
        run_check(
            check.name,
            partial(check.function, context),
            reason=check.reason,
            seq_len=seq_len,
            depends_on_length=check.depends_on_length,
            expected=expected.get(check.name),
            reproduce=_call(context, seq_len, check.name),
        )
        for check in MIXER_CHECKS.values()
        if (dtype == torch.float64 or not check.needs_float64)
        and (check.name in selected if selected is not None else include_slow or not check.is_slow)
    ]
    return Report(name, tuple(results))


def _subject(mixer: Mixerlike, hidden_size: int | None) -> tuple[str, Callable[[], nn.Module], int]:
    """Name, builder and hidden size of what is to be checked."""
    if isinstance(mixer, nn.Module):
        return type(mixer).__name__, copy_of(mixer), hidden_size or _first_width(mixer)
    if isinstance(mixer, Mapping | Config):
        return _configured(mixer, hidden_size)
    if not callable(mixer):
        raise HarnessError(f"mixer: expected a module, a function that builds one or a config, got {mixer!r}")
    with torch.random.fork_rng():
        built = _built(mixer)
    return getattr(mixer, "__name__", type(mixer).__name__), mixer, hidden_size or _first_width(built)


def _configured(
    config: Mapping[str, Any] | Config, hidden_size: int | None
) -> tuple[str, Callable[[], nn.Module], int]:
    try:
        valid: Any = TypeAdapter(MixerSpec).validate_python(config)
    except ValidationError as error:
        raise HarnessError(f"mixer: expected the config of a mixer, got {config!r}: {error}") from error
    size = hidden_size or 8 * valid.num_heads
    make = partial(build_mixer, valid, hidden_size=size)
    _built(make)
    return repr(dict(config) if isinstance(config, Mapping) else config.model_dump()), make, size


def _built(make: Callable[[], nn.Module]) -> nn.Module:
    try:
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


def _call(context: MixerContext, seq_len: int, check: str) -> str:
    dtype = "" if context.dtype == torch.float64 else f"dtype={context.dtype}, "
    sizes = f"hidden_size={context.hidden_size}, seed={context.seed}, seq_len={seq_len}"
    return f"check_mixer({context.name}, {sizes}, {dtype}only=[{check!r}])"
