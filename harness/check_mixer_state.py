"""Checks of the state as a value: its declared size, its rows, and that nobody changes it."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .context import CheckFailure
from .mixer_check import mixer_check
from .mixer_context import BATCH, MixerContext, Probe, expect_same_bits, state_tensors

ROWS = 3


@mixer_check("state_bytes(seq_len) is what the state of one sequence holds: memory is planned with it")
def declared_state_size(context: MixerContext, seq_len: int) -> None:
    probe = context.probe(torch.float32)
    declare: Any = getattr(probe.mixer, "state_bytes", None)
    if declare is None:
        raise CheckFailure("expected a method state_bytes(seq_len) -> int, bytes of the float32 state of one sequence")
    for length in sorted({1, 2, 3, seq_len // 2, seq_len, 2 * seq_len + 1} - {0}):
        hidden = probe.hidden(1, length)
        for sizes in ([length], [1, length - 1]):
            if sizes[-1] == 0:
                continue
            with torch.no_grad():
                tensors = state_tensors(probe.run(hidden, sizes)[1])
            real = {name: x.nbytes for name, x in tensors.items()}
            if declare(length) != sum(real.values()):
                held = ", ".join(f"{name} {size}" for name, size in real.items())
                calls = "one call" if len(sizes) == 1 else "two calls"
                raise CheckFailure(
                    f"state_bytes({length}): declared {declare(length)}, after {calls} {sum(real.values())} ({held})"
                )


@mixer_check("a state keeps nothing else alive: a view into a long sequence would hold all of it in memory")
def states_own_their_memory(context: MixerContext, seq_len: int) -> None:
    probe = context.probe()
    with torch.no_grad():
        states = {calls: probe.run(probe.hidden(BATCH, seq_len), sizes)[1] for calls, sizes in _calls(seq_len).items()}
    for calls, state in states.items():
        for name, x in state_tensors(state).items():
            kept = x.untyped_storage().nbytes()
            if kept > x.nbytes:
                raise CheckFailure(f"{name}: expected {x.nbytes} bytes in memory after {calls}, keeps {kept}; clone it")


@mixer_check("select reorders, repeats and drops sequences: beam search and finished rows")
def select_picks_rows(context: MixerContext, seq_len: int) -> None:
    for rows in ([2, 0, 1], [1, 1, 0, 2], [2]):
        from_the_start = partial(_continue_rows, seq_len=seq_len, rows=rows, index=None)
        for index in (rows, torch.tensor(rows)):
            try:
                context.expect(partial(_continue_rows, seq_len=seq_len, rows=rows, index=index), from_the_start)
            except CheckFailure as failure:
                raise CheckFailure(f"{failure}, after state.select({index})") from None


@mixer_check("a state passed in stays as it was: a kept state can be used again")
def states_are_not_modified(context: MixerContext, seq_len: int) -> None:
    probe = context.probe()
    hidden, after = probe.hidden(BATCH, seq_len), probe.hidden(BATCH, seq_len, draw=1)
    with torch.no_grad():
        state = probe.run(hidden)[1]
        before = {name: x.clone() for name, x in state_tensors(state).items()}
        for new in (1, seq_len):
            first = probe.run(after[:, :new], state=state)[0]
            expect_same_bits(state_tensors(state), before)
            expect_same_bits({"output": probe.run(after[:, :new], state=state)[0]}, {"output": first})
    expect_same_bits({"hidden": hidden}, {"hidden": probe.hidden(BATCH, seq_len)})


@mixer_check("a state of another batch is refused: one row must not serve every sequence unnoticed")
def states_of_another_batch_are_refused(context: MixerContext, seq_len: int) -> None:
    probe = context.probe()
    state = probe.run(probe.hidden(1, seq_len))[1]
    try:
        probe.run(probe.hidden(BATCH, 1), state=state)
    except Exception:
        return
    raise CheckFailure(f"expected an error for a state of 1 row beside hidden states of {BATCH}, got an output")


@mixer_check("the same call twice gives the same bits: output, state and gradients")
def runs_are_repeatable(context: MixerContext, seq_len: int) -> None:
    first, second = (_everything(context.probe(), seq_len) for _ in range(2))
    expect_same_bits(second, first)


@mixer_check("NaN in memory that was never written does not reach a result")
def unwritten_memory_is_never_read(context: MixerContext, seq_len: int) -> None:
    with _new_memory(is_nan=False):
        want = _everything(context.probe(), seq_len)
    with _new_memory(is_nan=True):
        got = _everything(context.probe(), seq_len)
    expect_same_bits(got, want)


@contextmanager
def _new_memory(*, is_nan: bool) -> Iterator[None]:
    """torch.empty and its like return memory full of NaN, or as it is. Either way torch runs the same algorithms."""
    settings: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    try:
        torch.use_deterministic_algorithms(True)
        settings.fill_uninitialized_memory = is_nan
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        settings.fill_uninitialized_memory = before[1]


def _continue_rows(probe: Probe, *, seq_len: int, rows: list[int], index: Any) -> dict[str, Tensor]:
    """Three more tokens for some rows of a batch: of its state by ``index``, or of the sequences themselves if None."""
    before, after = probe.hidden(ROWS, seq_len), probe.hidden(len(rows), 3, draw=1)
    with torch.no_grad():
        state = probe.run(before[rows])[1] if index is None else probe.run(before)[1].select(index)
        return {"output": probe.run(after, state=state)[0]}


def _everything(probe: Probe, seq_len: int) -> dict[str, Tensor]:
    """Outputs and gradients of a first call and of one that continues it, and the tensors of the last state."""
    hidden = probe.hidden(BATCH, seq_len + 1).requires_grad_()
    output, state = probe.run(hidden, [seq_len, 1])
    return {"output": output, **state_tensors(state)} | probe.differentiate({"output": output}, {"hidden": hidden})


def _calls(seq_len: int) -> dict[str, list[int]]:
    return {"one call": [seq_len], "two calls": [seq_len - 1, 1]} if seq_len > 1 else {"one call": [seq_len]}
