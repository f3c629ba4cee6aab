"""What scan hands to the operators of the kernels means the same as the definition, by their stand-ins in torch.

The kernels are held to the same operands in ``tests/kernels``.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from statemix import scan
from statemix.harness import CATALOGUE
from statemix.harness.problem import Problem, Sizes, Subject
from statemix.harness.transition import as_subject
from statemix.harness.user_file import load_transition
from statemix.transitions import DiagonalGate, Householder, Product
from statemix.transitions.engine import choice

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
USER_FILES = ("gdn2", "rwkv7", "comba", "longhorn")


@pytest.fixture(autouse=True)
def everything_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "device_obstacle", lambda device: None)
    monkeypatch.setattr(choice, "size_obstacle", lambda *sizes: None)  # it refuses float64


def subject(name: str) -> Subject:
    return CATALOGUE[name] if name in CATALOGUE else as_subject(load_transition(str(EXAMPLES / f"{name}.py")))


def results(problem: Problem, upstream: list[Tensor], **options: Any) -> list[Tensor]:
    made, tensors = scan(**problem.arguments(), scale=0.3, **options), list(problem.tensors().values())
    return [*made, *torch.autograd.grad(made, tensors, upstream, allow_unused=True, materialize_grads=True)]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", [*CATALOGUE, *USER_FILES])
def test_results_and_gradients_are_those_of_the_definition(name: str, packed: bool) -> None:
    sizes = Sizes(batch=1 if packed else 2, seq_len=9)
    problem = subject(name).make(sizes, torch.Generator().manual_seed(0))
    num_states = 4 if packed else 2
    state = torch.randn(num_states, sizes.num_value_heads, sizes.value_dim, sizes.key_dim, dtype=torch.float64)
    problem = replace(problem, initial_state=state).leaves()
    if packed:
        problem = replace(problem, cu_seqlens=torch.tensor([0, 0, 4, 4, 8], dtype=torch.int32))
    output = (sizes.batch, sizes.seq_len, sizes.num_value_heads, sizes.value_dim)
    upstream = [torch.randn(output, dtype=torch.float64), torch.randn_like(state)]
    wanted = results(problem, upstream, form="recurrent", backend="torch")
    got = results(problem, upstream, form="chunk", backend="triton")
    with torch.no_grad():
        made = scan(**problem.arguments(), scale=0.3, form="recurrent", backend="triton")
    for x, y in [*zip(got, wanted, strict=True), *zip(made, wanted[:2], strict=True)]:
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-11)  # float64 sums in another order: 100 terms of size 10


@pytest.mark.parametrize("along_the_key", [True, False])
def test_a_compiler_takes_it_whole_and_again_for_other_lengths(along_the_key: bool) -> None:
    graphs: list[Any] = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return aot_eager(graph, inputs)

    def run(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, beta: Tensor, direction: Tensor) -> Any:
        transition = Product(DiagonalGate(gate), Householder(k if along_the_key else direction, beta))
        return scan(q, k, v, transition, write=beta, form="chunk", backend="triton")

    aot_eager = torch._dynamo.lookup_backend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend=count)
    for seq_len in (128, 161, 1, 128):
        q, k, direction = (torch.nn.functional.normalize(torch.randn(2, seq_len, 2, 8), dim=-1) for _ in range(3))
        given = [
            q,
            k,
            torch.randn(2, seq_len, 4, 6),
            -torch.rand(2, seq_len, 4, 8),
            torch.rand(2, seq_len, 4),
            direction,
        ]
        for x in given[: 5 if along_the_key else 6]:
            x.requires_grad_()
        inputs = [x for x in given if x.requires_grad]
        made = [run(*given), compiled(*given)]
        upstream = [torch.randn_like(x) for x in made[0]]
        grads = [torch.autograd.grad(results, inputs, upstream) for results in made]
        for pair in (made, grads):
            for x, y in zip(*pair, strict=True):
                torch.testing.assert_close(x, y)
    assert len(graphs) <= 2
