"""Checks that every way to run a recurrence gives the same numbers and the same gradients."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from statemix.harness.check import check
from statemix.harness.problem import Problem
from statemix.transitions import ScanResult

from .definition import definition
from .recurrence import Recurrence, Run, around, differentiate

DOCUMENTS = (0, 0, 5, 5, 22, 23, 37)  # an empty document first and later, one token, starts inside a chunk of 16


@check("outputs, states and every gradient are those of the definition in float64")
def forms_equal_the_definition(recurrence: Recurrence) -> None:
    recurrence.expect_definition(recurrence.problem())


@check("the form that is chosen without being asked is right too")
def automatic_form_equals_the_definition(recurrence: Recurrence) -> None:
    recurrence.expect_equivalent([recurrence.run("auto")], definition, recurrence.problem())


@check("T = 1, 4, 17, 63, 65, 100: tails, single tokens and whole chunks", is_slow=True)
def any_length_is_right(recurrence: Recurrence) -> None:
    run = recurrence.run("auto", chunk_size=64)
    for seq_len in (1, 4, 17, 63, 65, 100):
        recurrence.expect_equivalent([run], definition, recurrence.problem(seq_len=seq_len))


@check("a tail of one token, a chunk and one token, one token alone")
def tails_are_right(recurrence: Recurrence) -> None:
    for seq_len in (1, 2, 17):
        problem = recurrence.problem(seq_len=min(seq_len, recurrence.sizes.seq_len))
        recurrence.expect_equivalent([recurrence.run("auto")], definition, problem)


@check("token by token with the state handed over is the whole sequence: decoding equals training")
def steps_equal_the_whole(recurrence: Recurrence) -> None:
    _expect_split(recurrence, [1] * recurrence.sizes.seq_len)


@check("any split that hands the state over is the whole sequence, gradients through the state included")
def splits_carry_the_state(recurrence: Recurrence) -> None:
    rest = recurrence.sizes.seq_len
    for split in ([1, rest - 1], [rest - 1, 1], [16, 16, rest - 32], [5, 17, rest - 22]):
        if min(split) > 0:
            _expect_split(recurrence, split)


@check("the chunk size does not change the result", needs=["has_chunk_form"])
def chunk_sizes_agree(recurrence: Recurrence) -> None:
    runs = [recurrence.run("chunk", chunk_size=chunk_size) for chunk_size in (32, 64, 128)]
    recurrence.expect_equivalent(runs, definition, recurrence.problem())


@check("packed documents are separate ones: nothing leaks, empty ones keep their state, tails give zeros")
def packed_equals_separate(recurrence: Recurrence) -> None:
    seq_len = recurrence.sizes.seq_len
    for end in (seq_len, max(seq_len - 3, 0)):  # with and without tokens after the last document
        recurrence.expect_definition(_packed(recurrence, [min(x, end) for x in DOCUMENTS]))


@check("tokens after the last document give zeros, in outputs and gradients")
def rows_after_the_documents_are_zero(recurrence: Recurrence) -> None:
    end = recurrence.sizes.seq_len // 2
    results = differentiate(recurrence.run("auto"), _packed(recurrence, [0, end]))
    tails = {name: results[name][:, end:] for name in ("output", "d q", "d k", "d v")}
    recurrence.expect_equal(tails, {name: torch.zeros_like(x) for name, x in tails.items()})


@check("a state that is absent or given; a loss on the output alone or on the final state alone")
def state_gradients_flow(recurrence: Recurrence) -> None:
    for has_state in (False, True):
        problem = recurrence.problem(has_state=has_state)
        for weights in ((1.0, 0.0), (0.0, 1.0)):
            *runs, reference = (
                around(run, after=partial(_weighted, *weights)) for run in (*recurrence.runs(), definition)
            )
            recurrence.expect_equivalent(runs, reference, problem)


def _weighted(on_output: float, on_state: float, output: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    return on_output * output, on_state * state


def _packed(recurrence: Recurrence, offsets: list[int]) -> Problem:
    """One sequence of documents at ``offsets`` with a random state for each."""
    problem, sizes = recurrence.problem(batch=1), recurrence.sizes
    shape = (len(offsets) - 1, sizes.num_value_heads, sizes.value_dim, sizes.key_dim)
    states = torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(recurrence.dtype)
    return replace(problem, initial_state=states, cu_seqlens=torch.tensor(offsets, dtype=torch.int32))


def _expect_split(recurrence: Recurrence, split: list[int]) -> None:
    run = partial(_in_parts, recurrence.run("auto"), split)
    recurrence.expect_equivalent([run], definition, recurrence.problem())


def _in_parts(run: Run, split: list[int], problem: Problem) -> ScanResult:
    state, start, outputs = problem.initial_state, 0, []
    for length in split:
        output, state = run(replace(problem.tokens(start, start + length), initial_state=state))
        outputs.append(output)
        start += length
    assert state is not None
    return ScanResult(torch.cat(outputs, dim=1), state)
