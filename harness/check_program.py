"""Checks of the program around the maths: determinism, compilation, unrequested gradients, size of the state."""

from dataclasses import replace

import torch

from .check import check
from .context import CHUNK_SIZE, CheckFailure, Context, differentiate, expect, expect_equal
from .definition import definition
from .problem import Sizes


@check("the same call twice gives the same bits, and leaves its inputs alone")
def runs_are_repeatable(context: Context, sizes: Sizes) -> None:
    problem = context.problem(sizes)
    before = {name: x.clone() for name, x in problem.tensors().items()}
    for form in context.forms():
        first = differentiate(context.run(form), problem)
        expect_equal(differentiate(context.run(form), problem), first)
    expect_equal(problem.tensors(), before)


@check("the state is [B, HV, V, K], the size that is declared")
def state_has_the_declared_size(context: Context, sizes: Sizes) -> None:
    state = context.run("auto")(context.problem(sizes, has_state=False)).final_state
    declared = [sizes.batch, sizes.num_value_heads, sizes.value_dim, sizes.key_dim]
    if list(state.shape) != declared:
        raise CheckFailure(f"final_state: expected {declared}, got {list(state.shape)}")


@check("no_grad, inference_mode and a single tensor that requires a gradient all run")
def partial_gradients_run(context: Context, sizes: Sizes) -> None:
    problem = context.problem(sizes)
    exact, low = (differentiate(definition, problem.to(dtype)) for dtype in (torch.float64, torch.float32))
    for guard in (torch.no_grad, torch.inference_mode):
        with guard():
            result = context.run("auto")(problem)  # may take another form than with gradients
        expect({"output": result.output}, exact, low)
    for name in problem.tensors():
        _expect_single_gradient(context, sizes, name)


def _expect_single_gradient(context: Context, sizes: Sizes, name: str) -> None:
    leaves = context.problem(sizes).leaves()
    for other, x in leaves.tensors().items():
        x.requires_grad_(other == name)
    result = context.run("auto")(leaves)
    if not result.output.requires_grad and not result.final_state.requires_grad:
        raise CheckFailure(f"{name}: expected a gradient, but no result depends on it")
    (result.output.sum() + result.final_state.sum()).backward()
    given = [other for other, x in leaves.tensors().items() if x.grad is not None]
    if given != [name]:
        raise CheckFailure(f"expected a gradient for {name} alone, got one for {given}")


@check("torch.compile traces the chunk form whole and gives the eager result", needs_chunk_form=True)
def chunk_form_compiles(context: Context, sizes: Sizes) -> None:
    problem = context.problem(replace(sizes, batch=1, seq_len=min(sizes.seq_len, CHUNK_SIZE + 1)))

    run = context.run("chunk")
    torch._dynamo.reset()
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    low = differentiate(run, problem.to(torch.float32))
    expect(differentiate(compiled, problem), differentiate(run, problem), low)
