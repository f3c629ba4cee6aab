"""Checks of the program around the maths: determinism, compilation, unrequested gradients, size of the state."""

from functools import partial

import torch

from statemix.harness.check import CheckFailure, check
from statemix.harness.context import expect_single_gradient

from .definition import definition
from .recurrence import CHUNK_SIZE, Recurrence, differentiate


@check("the same call twice gives the same bits, and leaves its inputs alone")
def runs_are_repeatable(recurrence: Recurrence) -> None:
    problem = recurrence.problem()
    before = {name: x.clone() for name, x in problem.tensors().items()}
    for run in recurrence.runs():
        once = differentiate(run, problem)
        recurrence.expect_equal(differentiate(run, problem), once)
    recurrence.expect_equal(problem.tensors(), before)


@check("the state is [B, HV, V, K], the size that is declared")
def state_has_the_declared_size(recurrence: Recurrence) -> None:
    state, sizes = recurrence.run("auto")(recurrence.problem(has_state=False)).final_state, recurrence.sizes
    declared = [sizes.batch, sizes.num_value_heads, sizes.value_dim, sizes.key_dim]
    if list(state.shape) != declared:
        raise CheckFailure(f"final_state: expected {declared}, got {list(state.shape)}")


@check("no_grad, inference_mode and a single tensor that requires a gradient all run")
def partial_gradients_run(recurrence: Recurrence) -> None:
    problem, run = recurrence.problem(), recurrence.run("auto")
    exact, low = (differentiate(definition, problem.to(dtype)) for dtype in (torch.float64, torch.float32))
    for guard in (torch.no_grad, torch.inference_mode):
        with guard():
            result = run(problem)  # may take another form than with gradients
        recurrence.expect_close({"output": result.output}, exact, low)
    for name in problem.tensors():
        leaves = problem.leaves()
        expect_single_gradient(name, leaves.tensors(), partial(run, leaves))


@check("torch.compile traces the chunk form whole and gives the eager result", needs=["has_chunk_form"])
def chunk_form_compiles(recurrence: Recurrence) -> None:
    problem = recurrence.problem(batch=1, seq_len=min(recurrence.sizes.seq_len, CHUNK_SIZE + 1))
    run = recurrence.run("chunk")
    torch._dynamo.reset()
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    low = differentiate(run, problem.to(torch.float32))
    recurrence.expect_close(differentiate(compiled, problem), differentiate(run, problem), low)
