"""Checks that every way to run a recurrence gives the same numbers and the same gradients."""

import functools
from dataclasses import replace

import torch

from statemix.transitions import ScanResult

from .check import check
from .context import Context, Run, differentiate, expect_definition, expect_equal, expect_equivalent
from .definition import definition
from .problem import Problem, Sizes

DOCUMENTS = (0, 0, 5, 5, 22, 23, 37)  # an empty document first and later, one token, starts inside a chunk of 16


@check("outputs, states and every gradient are those of the definition in float64")
def forms_equal_the_definition(context: Context, sizes: Sizes) -> None:
    problem = context.problem(sizes)
    for form in context.forms():
        expect_definition(context.run(form), problem)


@check("the form that is chosen without being asked is right too")
def automatic_form_equals_the_definition(context: Context, sizes: Sizes) -> None:
    expect_definition(context.run("auto"), context.problem(sizes))


@check("T = 1, 4, 17, 63, 65, 100: tails, single tokens and whole chunks", is_slow=True)
def any_length_is_right(context: Context, sizes: Sizes) -> None:
    for seq_len in (1, 4, 17, 63, 65, 100):
        problem = context.problem(replace(sizes, seq_len=seq_len))
        expect_definition(context.run("auto", chunk_size=64), problem)


@check("a tail of one token, a chunk and one token, one token alone")
def tails_are_right(context: Context, sizes: Sizes) -> None:
    for seq_len in (1, 2, 17):
        expect_definition(context.run("auto"), context.problem(replace(sizes, seq_len=min(seq_len, sizes.seq_len))))


@check("token by token with the state handed over is the whole sequence: decoding equals training")
def steps_equal_the_whole(context: Context, sizes: Sizes) -> None:
    _expect_splits(context, sizes, [[1] * sizes.seq_len])


@check("any split that hands the state over is the whole sequence, gradients through the state included")
def splits_carry_the_state(context: Context, sizes: Sizes) -> None:
    rest = sizes.seq_len
    splits = [[1, rest - 1], [rest - 1, 1], [16, 16, rest - 32], [5, 17, rest - 22]]
    _expect_splits(context, sizes, [split for split in splits if min(split) > 0])


@check("the chunk size does not change the result", needs_chunk_form=True)
def chunk_sizes_agree(context: Context, sizes: Sizes) -> None:
    problem = context.problem(sizes)
    for chunk_size in (32, 64, 128):
        expect_definition(context.run("chunk", chunk_size=chunk_size), problem)


@check("packed documents are separate ones: nothing leaks, empty ones keep their state, tails give zeros")
def packed_equals_separate(context: Context, sizes: Sizes) -> None:
    offsets = [min(x, sizes.seq_len) for x in DOCUMENTS]
    for end in (sizes.seq_len, max(sizes.seq_len - 3, 0)):  # with and without rows after the last document
        packed = _packed(context, sizes, [min(x, end) for x in offsets])
        for form in context.forms():
            expect_definition(context.run(form), packed)


@check("rows after the last document give zeros, in outputs and gradients")
def rows_after_the_documents_are_zero(context: Context, sizes: Sizes) -> None:
    end = sizes.seq_len // 2
    packed = _packed(context, sizes, [0, end])
    results = differentiate(context.run("auto"), packed)
    for name in ("output", "d q", "d k", "d v"):
        tail = results[name][:, end:]
        expect_equal({name: tail}, {name: torch.zeros_like(tail)})


@check("a state that is absent or given; a loss on the output alone or on the final state alone")
def state_gradients_flow(context: Context, sizes: Sizes) -> None:
    def weighted(run: Run, on_output: float, on_state: float) -> Run:
        def results(p: Problem) -> ScanResult:
            output, state = run(p)
            return ScanResult(on_output * output, on_state * state)

        return results

    for has_state in (False, True):
        problem = context.problem(sizes, has_state=has_state)
        for weights in ((1.0, 0.0), (0.0, 1.0)):
            for form in context.forms():
                expect_equivalent(weighted(context.run(form), *weights), weighted(definition, *weights), problem)


def _packed(context: Context, sizes: Sizes, offsets: list[int]) -> Problem:
    """One row with documents at ``offsets`` and a random state for each."""
    problem = context.problem(replace(sizes, batch=1))
    shape = (len(offsets) - 1, sizes.num_value_heads, sizes.value_dim, sizes.key_dim)
    states = torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return replace(problem, initial_state=states.to(context.dtype), cu_seqlens=torch.tensor(offsets, dtype=torch.int32))


def _expect_splits(context: Context, sizes: Sizes, splits: list[list[int]]) -> None:
    problem = context.problem(sizes)
    for split in splits:
        expect_definition(functools.partial(_in_pieces, context, split), problem)


def _in_pieces(context: Context, split: list[int], problem: Problem) -> ScanResult:
    state, start, outputs = problem.initial_state, 0, []
    for length in split:
        piece = replace(problem.tokens(start, start + length), initial_state=state)
        output, state = context.run("auto")(piece)
        outputs.append(output)
        start += length
    assert state is not None
    return ScanResult(torch.cat(outputs, dim=1), state)
