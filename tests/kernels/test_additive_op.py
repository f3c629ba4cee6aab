"""The operators of the additive family: registered as torch expects, differentiable, and traced whole."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from statemix.kernels import additive_op, additive_scan, availability, recurrent_scan
from statemix.kernels.additive_operands import AdditiveOperands
from statemix.kernels.launch import recording
from statemix.kernels.launch_config import ARCHS, compile_for
from statemix.transitions import DiagonalGate, FixedDecay, Identity, ScalarGate, Transition, scan

DECAYS = (None, "fixed", "scalar", "diagonal")
OPERATORS = torch.ops.statemix


def operands(
    decay: str | None,
    *,
    packed: bool = False,
    has_state: bool = True,
    seq_len: int = 19,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    heads: tuple[int, int, int] = (1, 2, 4),
    dims: tuple[int, int] = (8, 6),
) -> list[Tensor | None]:
    """q, k, v, log_decay, initial_state, cu_seqlens; leaves that require gradients."""
    (num_queries, num_keys, num_values), (key_dim, value_dim) = heads, dims
    batch, num_states = (1, 4) if packed else (2, 2)
    lead = (batch, seq_len, num_values)
    shape = {None: None, "fixed": (num_values,), "scalar": lead, "diagonal": (*lead, key_dim)}[decay]

    def normal(*sizes: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(sizes, device=device).to(dtype).requires_grad_()

    return [
        normal(batch, seq_len, num_queries, key_dim),
        normal(batch, seq_len, num_keys, key_dim),
        normal(*lead, value_dim),
        None if shape is None else (-torch.rand(shape, device=device)).requires_grad_(),
        normal(num_states, num_values, value_dim, key_dim, dtype=torch.float32) if has_state else None,
        torch.tensor([0, 0, seq_len // 3, seq_len // 2, seq_len - 2], dtype=torch.int32, device=device)
        if packed
        else None,
    ]


def detached(given: list[Tensor | None]) -> list[Tensor | None]:
    return [None if x is None else x.detach() for x in given]


def leaves(given: list[Tensor | None]) -> list[Tensor]:
    return [x for x in given if x is not None and x.requires_grad]


def failures(operator: Any, *arguments: Any) -> dict[str, Any]:
    checked = torch.library.opcheck(operator, arguments, raise_exception=False)
    return {name: result for name, result in checked.items() if result != "SUCCESS"}


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize(("packed", "has_state"), [(False, False), (True, True)], ids=["batch", "packed_with_states"])
def test_opcheck_passes(decay: str | None, packed: bool, has_state: bool) -> None:
    expect_opcheck(operands(decay, packed=packed, has_state=has_state, seq_len=9))


def expect_opcheck(given: list[Tensor | None]) -> None:
    has_decay, has_state = given[3] is not None, given[4] is not None
    assert failures(OPERATORS.additive_scan.default, *given, 0.3, True) == {}
    output, final_state, saved = OPERATORS.additive_scan(*detached(given), 0.3, True)
    grads = (output, final_state if has_state else None) if has_decay else (None, final_state)
    arguments = (*grads, *detached(given), saved, 0.3, has_decay)
    assert failures(OPERATORS.additive_scan_backward.default, *arguments) == {}
    assert failures(OPERATORS.recurrent_scan.default, *detached(given), 0.3) == {}


@pytest.mark.parametrize("arch", ARCHS)
def test_what_a_compiler_is_told_has_the_shapes_and_strides_of_what_the_kernels_make(arch: Any) -> None:
    from statemix.kernels.additive_triton import additive_backward, additive_forward

    def layout(tensors: Any) -> list[Any]:
        return [(x.shape, x.stride(), x.dtype) for x in tensors]

    for decay, packed, dims, seq_len in product(DECAYS, (False, True), ((16, 24), (300, 64)), (4, 130)):
        options: dict[str, Any] = {"packed": packed, "dims": dims, "seq_len": seq_len, "dtype": torch.bfloat16}
        with compile_for(arch), torch.no_grad():
            meta = [None if x is None else x.to("meta") for x in detached(operands(decay, **options))]
            inputs = AdditiveOperands(*meta)
            with recording():
                made = additive_forward(inputs, scale=1.0, save=True)
                grads = additive_backward(made[0], None, inputs, made[2], scale=1.0, needs_decay_grad=decay is not None)
            with FakeTensorMode():
                fakes = [None if x is None else torch.empty(x.shape, dtype=x.dtype, device="cuda") for x in meta]
                told = OPERATORS.additive_scan(*fakes, 1.0, True)
                told_grads = OPERATORS.additive_scan_backward(told[0], None, *fakes, told[2], 1.0, decay is not None)
        assert layout((*told[:2], *told[2])) == layout((*made[:2], *made[2])), (decay, options)
        shapes = [None if x is None else x.shape for x in grads]
        assert [x.shape if wanted else None for x, wanted in zip(told_grads, shapes, strict=True)] == shapes


def definition(given: list[Tensor | None], scale: float) -> tuple[Tensor, Tensor]:
    """The recurrence token by token, in float64."""
    q, k, v, log_decay, state, cu_seqlens = (x if x is None or x.dtype == torch.int32 else x.double() for x in given)
    assert q is not None and k is not None and v is not None
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
    made: dict[int, Callable[[Tensor], Transition]] = {1: FixedDecay, 3: ScalarGate, 4: DiagonalGate}
    transition = Identity() if log_decay is None else made[log_decay.ndim](log_decay)
    options: dict[str, Any] = {"initial_state": state, "cu_seqlens": cu_seqlens, "scale": scale}
    return scan(q, k, v, transition, form="recurrent", backend="torch", **options)


def expect_definition(given: list[Tensor | None], results: tuple[Tensor, Tensor], limits: tuple[float, float]) -> None:
    """Results and every gradient, in norm, relative to float64 on the same inputs."""
    exact = definition(given, 0.3)
    upstream = [torch.randn_like(x) for x in results]
    grads, exact_grads = (
        torch.autograd.grad(r, leaves(given), [u.to(x.dtype) for u, x in zip(upstream, r, strict=True)])
        for r in (results, exact)
    )
    for limit, got, wanted in ((limits[0], results, exact), (limits[1], grads, exact_grads)):
        for x, y in zip(got, wanted, strict=True):
            assert (x.double() - y).norm() <= limit * y.norm()


@pytest.mark.parametrize(("decay", "packed", "has_state"), [*product(DECAYS, (False, True), (False, True))])
def test_results_and_gradients_are_those_of_the_definition(decay: str | None, packed: bool, has_state: bool) -> None:
    given = operands(decay, packed=packed, has_state=has_state)
    expect_definition(given, additive_scan(*given, scale=0.3), (1e-6, 1e-5))  # float32: 100 sums of eps 1.2e-7
    with torch.no_grad():
        for x, y in zip(recurrent_scan(*given, scale=0.3), definition(given, 0.3), strict=True):
            assert (x.double() - y).norm() <= 1e-6 * y.norm()


def test_unrequested_gradients_are_none_and_requested_ones_do_not_depend_on_the_others() -> None:
    given = operands("diagonal")
    whole = torch.autograd.grad([x.sum() for x in additive_scan(*given, scale=1.0)], leaves(given))
    for i, grad in enumerate(whole):
        alone = [None if x is None else x.detach().requires_grad_(j == i) for j, x in enumerate(given)]
        torch.stack([x.sum() for x in additive_scan(*alone, scale=1.0)]).sum().backward()
        assert [x is not None and x.grad is not None for x in alone] == [j == i for j in range(6)]
        torch.testing.assert_close(alone[i].grad, grad)  # type: ignore[union-attr]


def test_a_loss_on_one_result_alone_has_gradients() -> None:
    given = operands("scalar")
    for which in (0, 1):
        got = torch.autograd.grad(additive_scan(*given, scale=0.3)[which].sum(), leaves(given), allow_unused=True)
        wanted = torch.autograd.grad(definition(given, 0.3)[which].sum(), leaves(given), allow_unused=True)
        for x, y in zip(got, wanted, strict=True):
            torch.testing.assert_close(x, torch.zeros_like(x) if y is None else y)


def test_strided_and_expanded_upstream_gradients_are_honoured() -> None:
    given = operands("scalar")
    output, final_state = additive_scan(*given, scale=0.3)
    dense = torch.randn(output.shape[::-1])
    for upstream in (dense.permute(3, 2, 1, 0), torch.ones(()).expand_as(output)):
        views, copies = (
            torch.autograd.grad(output, leaves(given)[:4], x, retain_graph=True)
            for x in (upstream, upstream.contiguous())
        )
        for x, y in zip(views, copies, strict=True):
            assert torch.equal(x, y)


def test_gradients_scale_with_the_upstream_gradient() -> None:
    given = operands("fixed")
    once, four_times = (
        torch.autograd.grad(additive_scan(*given, scale=0.3)[0].sum() * factor, leaves(given)[:4]) for factor in (1, 4)
    )
    assert all(torch.equal(4 * x, y) for x, y in zip(once, four_times, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_results_have_the_dtype_of_q_and_states_that_of_sums(dtype: torch.dtype) -> None:
    given = operands("scalar", dtype=dtype)
    output, final_state = additive_scan(*given, scale=0.3)
    assert output.dtype == dtype
    assert final_state.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.stack([output.sum().double(), final_state.sum().double()]).sum().backward()
    assert [x.grad.dtype for x in leaves(given)] == [x.dtype for x in leaves(given)]  # type: ignore[union-attr]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpoints_change_nothing(use_reentrant: bool) -> None:
    q, k, v, log_decay, *_ = operands("scalar", has_state=False)
    inputs = leaves([q, k, v, log_decay])

    def run(*tensors: Tensor) -> Tensor:
        return additive_scan(*tensors, None, None, scale=0.5)[0].sin().sum()

    wanted = torch.autograd.grad(run(*inputs), inputs)
    checkpoint(run, *inputs, use_reentrant=use_reentrant).backward()
    assert all(x.grad is not None and torch.equal(x.grad, y) for x, y in zip(inputs, wanted, strict=True))


def test_a_second_derivative_is_refused_and_not_wrong() -> None:
    given = operands("scalar")
    output, _ = additive_scan(*given, scale=0.3)
    with pytest.raises(NotImplementedError, match="no second derivative; use backend='torch'"):
        torch.autograd.grad(output.sum(), leaves(given)[0], create_graph=True)


def test_states_are_saved_for_a_backward_pass_alone_and_not_to_be_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def forward(*arguments: Any, scale: float, save: bool) -> Any:
        asked.append(save)
        return additive_forward(*arguments, scale=scale, save=save)

    additive_forward = additive_op.additive_torch.additive_forward
    monkeypatch.setattr(additive_op.additive_torch, "additive_forward", forward)
    given = operands("scalar")
    additive_scan(*given, scale=1.0)
    additive_scan(*given, scale=1.0, recompute=True)
    additive_scan(*detached(given), scale=1.0)
    with torch.no_grad():
        additive_scan(*given, scale=1.0)
    assert asked == [True, False, False, False]


@pytest.mark.parametrize("decay", ["scalar", "diagonal"])
def test_a_compiler_takes_it_whole_and_again_for_other_lengths(decay: str) -> None:
    run_in_one_graph(decay, torch.float32, "cpu", limits=(0.0, 0.0))


def run_in_one_graph(decay: str, dtype: torch.dtype, device: str, *, limits: tuple[float, float]) -> None:
    """Compiled equals eager for T = 128, 161, 1, with gradients, and at most one graph more is made for T = 1."""
    graphs: list[Any] = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return aot_eager(graph, inputs)

    def run(*given: Any) -> Any:
        return additive_scan(*given, scale=0.3)

    aot_eager = torch._dynamo.lookup_backend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend=count)
    for seq_len in (128, 161, 1, 128):
        given = operands(decay, seq_len=seq_len, dtype=dtype, device=device)
        results = [run(*given), compiled(*given)]
        upstream = [torch.randn_like(x) for x in results[0]]
        grads = [torch.autograd.grad(r, leaves(given), upstream) for r in results]
        for limit, pair in zip(limits, (results, grads), strict=True):
            for x, y in zip(*pair, strict=True):
                assert (x - y).norm() <= limit * x.norm()
    assert len(graphs) <= 2


def test_the_interpreter_is_off_where_triton_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability, "HAS_TRITON", False)
    assert not availability.is_interpreted()
    assert availability.device_obstacle(torch.device("cuda")) == "triton is not installed"


def test_what_stands_in_the_way_is_said_in_words() -> None:
    assert availability.size_obstacle(torch.bfloat16, 512, 512) is None
    assert "float64" in str(availability.size_obstacle(torch.float64, 64, 64))
    assert "V = 513" in str(availability.size_obstacle(torch.float32, 64, 513))
    assert "interpreter is off" in str(availability.device_obstacle(torch.device("cpu")))
    assert "mps" in str(availability.device_obstacle(torch.device("mps")))


def test_a_gpu_that_the_table_has_no_tiles_for_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def has(major: int, minor: int) -> str | None:
        monkeypatch.setattr(availability, "capability", lambda device: (major, minor))
        return availability.device_obstacle(torch.device("cuda"))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert has(8, 0) is None
    assert has(9, 0) is None
    assert "99 KB" in str(has(8, 9))
    assert "capability 7.5" in str(has(7, 5))


@pytest.mark.gpu
@pytest.mark.parametrize("decay", DECAYS)
def test_on_a_gpu_results_and_gradients_are_those_of_the_definition(decay: str | None) -> None:
    for dtype, packed in product((torch.float32, torch.bfloat16, torch.float16), (False, True)):
        given = operands(decay, packed=packed, seq_len=150, dtype=dtype, device="cuda", dims=(64, 48))
        limits = (1e-5, 1e-4) if dtype == torch.float32 else (8e-3, 2e-2)  # 16-bit inputs of products: 2^-8, 2^-11
        for recompute in (False, True):
            expect_definition(given, additive_scan(*given, scale=0.3, recompute=recompute), limits)


@pytest.mark.gpu
@pytest.mark.parametrize("decay", DECAYS)
def test_on_a_gpu_opcheck_passes(decay: str | None) -> None:
    expect_opcheck(operands(decay, device="cuda"))  # a batch: chunks that packed documents leave unused stay unwritten


@pytest.mark.gpu
@pytest.mark.parametrize("decay", ["scalar", "diagonal"])
def test_on_a_gpu_a_compiler_takes_it_whole_and_again_for_other_lengths(decay: str) -> None:
    run_in_one_graph(decay, torch.bfloat16, "cuda", limits=(0.0, 0.0))


@pytest.mark.gpu
def test_on_a_gpu_a_cuda_graph_replays_it() -> None:
    given = operands("diagonal", packed=True, seq_len=150, dtype=torch.bfloat16, device="cuda", dims=(64, 64))
    wanted = additive_scan(*detached(given), scale=0.3)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = additive_scan(*detached(given), scale=0.3)
    graph.replay()
    assert all(torch.equal(x, y) for x, y in zip(results, wanted, strict=True))
