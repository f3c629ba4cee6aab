"""Checks of the state as a value: its declared size, its sequences, and that nobody changes it."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from statemix.harness.check import CheckFailure, check
from statemix.harness.memory import new_memory

from .checked_mixer import BATCH, CheckedMixer, Probe
from .states import select, state_tensors

SEQUENCES = 3


@check("state_bytes(seq_len) is what the state of one sequence holds: memory is planned with it", needs=["is_causal"])
def declared_state_size(mixer: CheckedMixer) -> None:
    probe = mixer.probe(torch.float32)
    declare: Any = getattr(probe.mixer, "state_bytes", None)
    if declare is None:
        raise CheckFailure("expected a method state_bytes(seq_len) -> int, bytes of the float32 state of one sequence")
    seq_len = mixer.seq_len
    for length in sorted({1, 2, 3, seq_len // 2, seq_len, 2 * seq_len + 1} - {0}):
        hidden = probe.hidden(1, length)
        for sizes in ([length], [1, length - 1]):
            if sizes[-1] == 0:
                continue
            with torch.no_grad():
                tensors = state_tensors(probe.run(hidden, sizes)[1])
            measured = {name: x.nbytes for name, x in tensors.items()}
            if declare(length) != sum(measured.values()):
                held = f"{sum(measured.values())} ({', '.join(f'{name} {size}' for name, size in measured.items())})"
                calls = "one call" if len(sizes) == 1 else "two calls"
                raise CheckFailure(f"state_bytes({length}): declared {declare(length)}, after {calls} {held}")


@check("a state of constant size holds the same tensors after one token and after many", needs=["has_constant_state"])
def state_size_is_constant(mixer: CheckedMixer) -> None:
    probe = mixer.probe()
    with torch.no_grad():
        states = {n: probe.run(probe.hidden(seq_len=n))[1] for n in (1, mixer.seq_len, 2 * mixer.seq_len + 1)}
    shapes = {n: {name: list(x.shape) for name, x in state_tensors(state).items()} for n, state in states.items()}
    for n in shapes:
        if shapes[n] != shapes[1]:
            raise CheckFailure(f"state: declared of constant size, {shapes[1]} after 1 token, {shapes[n]} after {n}")


@check("a state keeps nothing else alive: a view into a long sequence would hold all of it in memory")
def states_own_their_memory(mixer: CheckedMixer) -> None:
    probe, parts = mixer.probe(), _calls(mixer.seq_len)
    with torch.no_grad():
        states = {calls: probe.run(probe.hidden(), sizes)[1] for calls, sizes in parts.items()}
    for calls, state in states.items():
        for name, x in state_tensors(state).items():
            kept = x.untyped_storage().nbytes()
            if kept > x.nbytes:
                raise CheckFailure(f"{name}: expected {x.nbytes} bytes in memory after {calls}, keeps {kept}; clone it")


@check("select reorders, repeats and drops sequences: beam search and finished sequences", needs=["is_causal"])
def select_picks_rows(mixer: CheckedMixer) -> None:
    for chosen in ([2, 0, 1], [1, 1, 0, 2], [2]):
        from_the_start = partial(_continue_some, chosen=chosen, index=None)
        for index in (chosen, torch.tensor(chosen)):
            try:
                mixer.expect_equivalent(partial(_continue_some, chosen=chosen, index=index), from_the_start)
            except CheckFailure as failure:
                raise CheckFailure(f"{failure}, after state.select({index})") from None


@check("a state passed in stays as it was: a kept state can be used again")
def states_are_not_modified(mixer: CheckedMixer) -> None:
    probe = mixer.probe()
    hidden, after = probe.hidden(), probe.hidden(draw=1)
    with torch.no_grad():
        state = probe.run(hidden)[1]
        before = {name: x.clone() for name, x in state_tensors(state).items()}
        for new in (1, mixer.seq_len):
            once = probe.run(after[:, :new], state=state)[0]
            mixer.expect_equal(state_tensors(state), before)
            mixer.expect_equal({"output": probe.run(after[:, :new], state=state)[0]}, {"output": once})
    mixer.expect_equal({"hidden": hidden}, {"hidden": probe.hidden()})


@check(
    "a state of another batch is refused: one sequence must not serve the whole batch unnoticed", needs=["is_causal"]
)
def states_of_another_batch_are_refused(mixer: CheckedMixer) -> None:
    probe = mixer.probe()
    state = probe.run(probe.hidden(1))[1]
    try:
        probe.run(probe.hidden(BATCH, 1), state=state)
    except Exception:
        return
    raise CheckFailure(f"expected an error for a state of 1 sequence beside hidden states of {BATCH}, got an output")


@check("the same call twice gives the same bits: output, state and gradients")
def runs_are_repeatable(mixer: CheckedMixer) -> None:
    first, second = (_everything(mixer.probe()) for _ in range(2))
    mixer.expect_equal(second, first)


@check("NaN in memory that was never written does not reach a result")
def unwritten_memory_is_never_read(mixer: CheckedMixer) -> None:
    with new_memory(is_nan=False):
        expected = _everything(mixer.probe())
    with new_memory(is_nan=True):
        mixer.expect_equal(_everything(mixer.probe()), expected)


def _continue_some(probe: Probe, *, chosen: list[int], index: Any) -> dict[str, Tensor]:
    """Three more tokens for some sequences: of the state of all by ``index``, or run by themselves if None."""
    before, after = probe.hidden(SEQUENCES), probe.hidden(len(chosen), 3, draw=1)
    with torch.no_grad():
        state = probe.run(before[chosen])[1] if index is None else select(probe.run(before)[1], index)
        return {"output": probe.run(after, state=state)[0]}


def _everything(probe: Probe) -> dict[str, Tensor]:
    """Outputs and gradients of a first call and of one that continues it, and the tensors of the last state."""
    values, state = probe.two_calls()
    return state_tensors(state) | values


def _calls(seq_len: int) -> dict[str, list[int]]:
    return {"one call": [seq_len], "two calls": [seq_len - 1, 1]} if seq_len > 1 else {"one call": [seq_len]}
