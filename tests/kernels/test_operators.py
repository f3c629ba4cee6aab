"""The operators: registered as torch expects, differentiable, and traced whole, with and without erase pairs."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from statemix.kernels import ScanOperands, chunk_kernels, recurrent_kernels, torch_kernels
from statemix.kernels.launch import recording
from statemix.kernels.launch_config import ARCHS, compile_for
from statemix.kernels.operators import saved_like, segments_of

DECAYS = (None, "scalar", "diagonal")
OPERATORS = torch.ops.statemix


def draw(
    decay: str | None,
    *,
    count: int = 1,
    packed: bool = False,
    absent: tuple[str, ...] = (),
    reads_before_decay: bool = False,
    seq_len: int = 19,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    heads: tuple[int, int, int, int] = (1, 4, 2, 4),
    dims: tuple[int, int] = (8, 6),
    blocks: int = 1,
    erases: bool = True,
) -> ScanOperands:
    """Leaves that require gradients; ``heads`` are those of q, a, b and states, of which ``blocks`` share a value."""
    (num_queries, num_reads, num_keys, num_values), (key_dim, value_dim) = heads, dims
    batch, num_states = (1, 4) if packed else (2, 2)
    rows, lead = (batch, seq_len * count), (batch, seq_len, num_values)
    absent = absent if erases else (*absent, "a", "erase_beta", "write")

    def leaf(x: Tensor, dtype: torch.dtype = dtype) -> Tensor:
        return x.to(device, dtype).requires_grad_()

    def unit(*shape: int) -> Tensor:
        return leaf(F.normalize(torch.randn(*rows, *shape), dim=-1))

    optional = {
        "a": unit(num_reads, key_dim),
        "erase_beta": leaf(torch.rand(*rows, num_values), torch.float32),
        "write": leaf(torch.rand(*rows, num_values), torch.float32),
        "initial_state": leaf(torch.randn(num_states, num_values, value_dim, key_dim), torch.float32),
    }
    optional |= dict.fromkeys(absent)
    offsets = torch.tensor([0, 0, seq_len // 3, seq_len // 2, seq_len - 2], dtype=torch.int32, device=device)
    decays = {"fixed": (num_values,), "scalar": lead, "diagonal": (*lead, key_dim)}
    return ScanOperands(
        q=leaf(torch.randn(batch, seq_len, num_queries, key_dim)),
        a=optional["a"],
        b=unit(num_keys, key_dim),
        v=leaf(torch.randn(*rows, num_values // blocks, value_dim)),
        erase_beta=optional["erase_beta"],
        write=optional["write"],
        log_decay=None if decay is None else leaf(-torch.rand(decays[decay]), torch.float32),
        initial_state=optional["initial_state"],
        cu_seqlens=offsets if packed else None,
        erases=erases,
        reads_before_decay=reads_before_decay,
        blocks=blocks,
    )


VARIANTS: dict[str, dict[str, Any]] = {
    "free": {},
    "free_without_factors": {"absent": ("erase_beta", "write", "initial_state")},
    "tied": {"absent": ("a",)},
    "tied_without_weights": {"absent": ("a", "write", "initial_state")},
    "three_steps_packed": {"count": 3, "packed": True, "absent": ("a",)},
    "free_two_steps_packed": {"count": 2, "packed": True, "absent": ("initial_state",)},
    "reads_before": {"reads_before_decay": True},
    "two_steps_read_before": {"count": 2, "reads_before_decay": True, "heads": (2, 1, 4, 4)},
    "tied_blocks": {"blocks": 2, "absent": ("a",)},
    "four_blocks_two_steps_packed": {"blocks": 4, "count": 2, "packed": True, "absent": ("write",)},
    "additive": {"erases": False},
    "additive_without_states": {"erases": False, "absent": ("initial_state",)},
    "additive_packed": {"erases": False, "packed": True},
    "additive_packed_without_states": {"erases": False, "packed": True, "absent": ("initial_state",)},
    "additive_three_steps": {"erases": False, "count": 3},
    "additive_two_steps_packed": {"erases": False, "count": 2, "packed": True},
}
CASES = [
    *product(DECAYS, VARIANTS),
    *(("fixed", name) for name, options in VARIANTS.items() if "erases" in options and "count" not in options),
]


def leaves(given: ScanOperands) -> list[Tensor]:
    return [x for x in given if isinstance(x, Tensor) and x.requires_grad]


def detached(given: ScanOperands) -> ScanOperands:
    return ScanOperands(*(x.detach() if isinstance(x, Tensor) else x for x in given))


def definition(given: ScanOperands, scale: float) -> tuple[Tensor, Tensor]:
    """The equation of ``ScanOperands`` one micro-step after another, in float64, with gradients."""
    q, a, b, v, beta, write, log_decay, initial, cu_seqlens = (
        x if x is None or x.dtype == torch.int32 else x.double() for x in given[:-3]
    )
    num_heads, count = given.num_heads, given.num_steps
    a = b if a is None else a
    q, a, b, v = (x.repeat_interleave(num_heads // x.shape[2], dim=2) for x in (q, a, b, v))
    a = a if beta is None else beta.unsqueeze(-1) * a
    a = a if given.erases else torch.zeros_like(a)
    v = v if write is None else write.unsqueeze(-1) * v
    if log_decay is None:
        log_decay = q.new_zeros(1, 1, 1).expand(*q.shape[:2], num_heads)
    log_decay = log_decay.expand(*q.shape[:2], num_heads) if log_decay.ndim == 1 else log_decay
    decay = (log_decay if log_decay.ndim == 4 else log_decay.unsqueeze(-1)).exp()
    initial = given.empty_state().double().zero_() if initial is None else initial
    offsets = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    outputs, finals = [], []
    for n, (start, end) in enumerate(zip(offsets, offsets[1:], strict=False)):
        state = initial if cu_seqlens is None else initial[n : n + 1]
        for t in range(start, end):
            before, state = state, state * decay[:, t, :, None, :]
            for row in range(t * count, (t + 1) * count):
                read_from = before if given.reads_before_decay and row == t * count else state
                u = v[:, row] - torch.einsum("bhvk,bhk->bhv", read_from, a[:, row])
                state = state + u.unsqueeze(-1) * b[:, row].unsqueeze(-2)
            outputs.append(scale * torch.einsum("bhvk,bhk->bhv", state, q[:, t]))
        finals.append(state)
    outputs += [torch.zeros_like(v[:, 0])] * (q.shape[1] - offsets[-1])
    return torch.stack(outputs, dim=1).unflatten(2, (-1, given.blocks)).sum(3), torch.cat(finals)


def expect_definition(given: ScanOperands, results: tuple[Tensor, Tensor], limits: tuple[float, float]) -> None:
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
    for grad, x in zip(grads, leaves(given), strict=True):
        assert (grad.shape, grad.dtype) == (x.shape, x.dtype)


@pytest.mark.parametrize(("decay", "variant"), CASES)
def test_results_and_gradients_are_those_of_the_definition(decay: str | None, variant: str) -> None:
    given = draw(decay, **VARIANTS[variant])
    expect_definition(given, chunk_kernels(given, scale=0.3), (2e-6, 2e-5))  # float32: sums of 100 products, solved
    with torch.no_grad():
        for x, y in zip(recurrent_kernels(given, scale=0.3), definition(given, 0.3), strict=True):
            assert (x.double() - y).norm() <= 2e-6 * y.norm()


def test_float64_is_exact() -> None:
    given = draw("diagonal", count=2, packed=True, reads_before_decay=True, dtype=torch.float64)
    expect_definition(given, chunk_kernels(given, scale=0.3), (1e-13, 1e-12))  # float64: eps 2e-16, some hundred sums


def failures(operator: Any, *arguments: Any) -> dict[str, Any]:
    checked = torch.library.opcheck(operator, arguments, raise_exception=False)
    return {name: result for name, result in checked.items() if result != "SUCCESS"}


def expect_opcheck(given: ScanOperands) -> None:
    has_decay = given.log_decay is not None
    assert failures(OPERATORS.scan.default, *given, 0.3, True) == {}
    plain = detached(given)
    output, final_state, saved = OPERATORS.scan(*plain, 0.3, True)
    both = (output, final_state if given.initial_state is not None else None)
    segment_length = segments_of(given)[1] if saved and given.erases else 0
    for grads, needs_decay_grad in ((both, has_decay), ((None, final_state), False)):
        arguments = (*grads, *plain, saved, segment_length, 0.3, needs_decay_grad)
        assert failures(OPERATORS.scan_backward.default, *arguments) == {}
    assert failures(OPERATORS.recurrent_scan.default, *plain, 0.3) == {}


@pytest.mark.parametrize(
    ("decay", "variant"),
    [
        (None, "tied_without_weights"),
        ("scalar", "three_steps_packed"),
        ("scalar", "tied_blocks"),
        ("diagonal", "reads_before"),
        *product((None, "fixed", "scalar", "diagonal"), ("additive_without_states", "additive_packed")),
        ("scalar", "additive_three_steps"),
    ],
)
def test_opcheck_passes(decay: str | None, variant: str) -> None:
    expect_opcheck(draw(decay, seq_len=6, **VARIANTS[variant]))


@pytest.mark.parametrize("arch", ARCHS)
def test_what_a_compiler_is_told_has_the_shapes_and_strides_of_what_the_kernels_make(arch: Any) -> None:
    delta = ("free", "three_steps_packed", "tied_without_weights", "tied_blocks")
    for decay, variant, dims, seq_len in product(DECAYS, delta, ((16, 24), (128, 64)), (4, 130, 1300)):
        expect_told(arch, decay, variant, dims, seq_len)
    additive, decays = ("additive", "additive_packed"), (None, "fixed", "scalar", "diagonal")
    for decay, variant, dims, seq_len in product(decays, additive, ((16, 24), (300, 64)), (4, 130)):
        expect_told(arch, decay, variant, dims, seq_len)
    expect_told(arch, "scalar", "additive_two_steps_packed", (16, 24), 130)


def expect_told(arch: Any, decay: str | None, variant: str, dims: tuple[int, int], seq_len: int) -> None:
    from statemix.kernels.triton import additive, delta

    def layout(tensors: Any) -> list[Any]:
        return [(x.shape, x.stride(), x.dtype) for x in tensors]

    given = draw(decay, dims=dims, seq_len=seq_len, dtype=torch.bfloat16, **VARIANTS[variant])
    kernels, needs_decay_grad = delta if given.erases else additive, decay is not None
    with compile_for(arch), torch.no_grad():
        meta = detached(given).map(lambda x: x.to("meta"))
        with recording():
            *made, saved = kernels.forward(meta, scale=1.0, save=True)
            grads = kernels.backward(made[0], None, meta, saved, scale=1.0, needs_decay_grad=needs_decay_grad)
        with FakeTensorMode():
            fakes = meta.map(lambda x: torch.empty(x.shape, dtype=x.dtype, device="cuda"))
            told = OPERATORS.scan(*fakes, 1.0, True)
            rest = (told[2], saved.segment_length, 1.0, needs_decay_grad)
            told_grads = OPERATORS.scan_backward(told[0], None, *fakes, *rest)
            assert saved_like(fakes).segment_length == saved.segment_length
    case = (decay, variant, dims, seq_len)
    assert layout((*told[:2], *told[2])) == layout((*made, *saved.tensors())), case
    expected = [(torch.Size([0]), torch.bfloat16) if x is None else (x.shape, x.dtype) for x in grads]
    assert [(x.shape, x.dtype) for x in told_grads] == expected, case


@pytest.mark.parametrize("variant", ["free", "additive"])
def test_unrequested_gradients_are_none_and_requested_ones_do_not_depend_on_the_others(variant: str) -> None:
    given = draw("diagonal", count=2 if variant == "free" else 1, **VARIANTS[variant])
    whole = torch.autograd.grad([x.sum() for x in chunk_kernels(given, scale=1.0)], leaves(given))
    names = [name for name, x in given._asdict().items() if isinstance(x, Tensor)]
    for name, grad in zip(names, whole, strict=True):
        alone = detached(given)
        alone = alone._replace(**{name: getattr(alone, name).requires_grad_()})
        torch.stack([x.sum() for x in chunk_kernels(alone, scale=1.0)]).sum().backward()
        assert [x for x in names if getattr(alone, x).grad is not None] == [name]
        torch.testing.assert_close(getattr(alone, name).grad, grad)


@pytest.mark.parametrize("variant", ["free", "additive"])
def test_a_loss_on_one_result_alone_has_gradients(variant: str) -> None:
    given = draw("scalar", **VARIANTS[variant])
    for which in (0, 1):
        got = torch.autograd.grad(chunk_kernels(given, scale=0.3)[which].sum(), leaves(given), allow_unused=True)
        wanted = torch.autograd.grad(definition(given, 0.3)[which].sum(), leaves(given), allow_unused=True)
        for x, y in zip(got, wanted, strict=True):
            torch.testing.assert_close(x, torch.zeros_like(x) if y is None else y.to(x.dtype), rtol=1e-4, atol=1e-5)


def test_strided_and_expanded_upstream_gradients_are_honoured() -> None:
    given = draw("scalar", **VARIANTS["additive"])
    output, _ = chunk_kernels(given, scale=0.3)
    dense = torch.randn(output.shape[::-1])
    for upstream in (dense.permute(3, 2, 1, 0), torch.ones(()).expand_as(output)):
        views, copies = (
            torch.autograd.grad(output, leaves(given)[:4], x, retain_graph=True)
            for x in (upstream, upstream.contiguous())
        )
        for x, y in zip(views, copies, strict=True):
            assert torch.equal(x, y)


def test_gradients_scale_with_the_upstream_gradient() -> None:
    given = draw("fixed", **VARIANTS["additive"])
    once, four_times = (
        torch.autograd.grad(chunk_kernels(given, scale=0.3)[0].sum() * factor, leaves(given)[:4]) for factor in (1, 4)
    )
    assert all(torch.equal(4 * x, y) for x, y in zip(once, four_times, strict=True))


@pytest.mark.parametrize("variant", ["free", "additive"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_results_have_the_dtype_of_q_and_states_that_of_sums(dtype: torch.dtype, variant: str) -> None:
    given = draw("scalar", dtype=dtype, **VARIANTS[variant])
    output, final_state = chunk_kernels(given, scale=0.3)
    assert output.dtype == dtype
    assert final_state.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.stack([output.sum().double(), final_state.sum().double()]).sum().backward()
    assert [x.grad.dtype for x in leaves(given)] == [x.dtype for x in leaves(given)]  # type: ignore[union-attr]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpoints_change_nothing(use_reentrant: bool) -> None:
    given = draw("scalar", **VARIANTS["additive_without_states"])
    inputs = leaves(given)

    def run(q: Tensor, b: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
        return chunk_kernels(given._replace(q=q, b=b, v=v, log_decay=log_decay), scale=0.5)[0].sin().sum()

    wanted = torch.autograd.grad(run(*inputs), inputs)
    checkpoint(run, *inputs, use_reentrant=use_reentrant).backward()
    assert all(x.grad is not None and torch.equal(x.grad, y) for x, y in zip(inputs, wanted, strict=True))


def test_a_second_derivative_is_refused_and_not_wrong() -> None:
    for given in (draw(None), draw("scalar", **VARIANTS["additive"])):
        output, _ = chunk_kernels(given, scale=0.3)
        with pytest.raises(NotImplementedError, match="no second derivative; use backend='torch'"):
            torch.autograd.grad(output.sum(), leaves(given)[0], create_graph=True)


@pytest.mark.parametrize("variant", ["free", "additive"])
def test_tensors_are_saved_for_a_backward_pass_alone_and_not_to_be_recomputed(
    variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def forward(*arguments: Any, scale: float, save: bool) -> Any:
        asked.append(save)
        return original(*arguments, scale=scale, save=save)

    original = torch_kernels.forward
    monkeypatch.setattr(torch_kernels, "forward", forward)
    given = draw("scalar", **VARIANTS[variant])
    chunk_kernels(given, scale=1.0)
    chunk_kernels(given, scale=1.0, recompute=True)
    chunk_kernels(detached(given), scale=1.0)
    with torch.no_grad():
        chunk_kernels(given, scale=1.0)
    assert asked == [True, False, False, False]


COMPILED = [
    ("scalar", "tied"),
    ("diagonal", "free_without_factors"),
    ("scalar", "tied_blocks"),
    ("scalar", "additive"),
    ("diagonal", "additive"),
]


@pytest.mark.parametrize(("decay", "variant"), COMPILED)
def test_a_compiler_takes_it_whole_and_again_for_other_lengths(decay: str, variant: str) -> None:
    run_in_one_graph(decay, variant, torch.float32, "cpu")


def run_in_one_graph(decay: str, variant: str, dtype: torch.dtype, device: str) -> None:
    """Compiled equals eager for T = 128, 161, 1, with gradients, and at most one graph more is made for T = 1."""
    graphs: list[Any] = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return aot_eager(graph, inputs)

    def run(*given: Any) -> Any:
        return chunk_kernels(ScanOperands(*given), scale=0.3)

    aot_eager = torch._dynamo.lookup_backend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend=count)
    for seq_len in (128, 161, 1, 128):
        given = draw(decay, seq_len=seq_len, dtype=dtype, device=device, **VARIANTS[variant])
        results = [run(*given), compiled(*given)]
        upstream = [torch.randn_like(x) for x in results[0]]
        grads = [torch.autograd.grad(r, leaves(given), upstream) for r in results]
        for pair in (results, grads):
            assert all(torch.equal(x, y) for x, y in zip(*pair, strict=True))
    assert len(graphs) <= 2


def test_a_compiler_takes_the_recurrent_form_whole() -> None:
    given = detached(draw("diagonal", count=2))
    compiled = torch.compile(
        lambda *given: recurrent_kernels(ScanOperands(*given), scale=0.3), fullgraph=True, backend="aot_eager"
    )
    for x, y in zip(compiled(*given), recurrent_kernels(given, scale=0.3), strict=True):
        assert torch.equal(x, y)


@pytest.mark.gpu
@pytest.mark.parametrize(("decay", "variant"), CASES)
def test_on_a_gpu_results_and_gradients_are_those_of_the_definition(decay: str | None, variant: str) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        given = draw(decay, seq_len=150, dtype=dtype, device="cuda", dims=(64, 48), **VARIANTS[variant])
        limits = (1e-5, 1e-4) if dtype == torch.float32 else (1e-2, 3e-2)  # 16-bit inputs of products: 2^-8, 2^-11
        for recompute in (False, True):
            expect_definition(given, chunk_kernels(given, scale=0.3, recompute=recompute), limits)
        with torch.no_grad():
            for x, y in zip(recurrent_kernels(given, scale=0.3), definition(given, 0.3), strict=True):
                assert (x.double() - y).norm() <= limits[0] * y.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["free", "additive"])
@pytest.mark.parametrize("decay", DECAYS)
def test_on_a_gpu_opcheck_passes(decay: str | None, variant: str) -> None:
    expect_opcheck(
        draw(decay, device="cuda", **VARIANTS[variant])
    )  # a batch: chunks that packed documents leave unused stay unwritten


@pytest.mark.gpu
@pytest.mark.parametrize(("decay", "variant"), COMPILED)
def test_on_a_gpu_a_compiler_takes_it_whole_and_again_for_other_lengths(decay: str, variant: str) -> None:
    run_in_one_graph(decay, variant, torch.bfloat16, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("erases", [False, True])
def test_on_a_gpu_a_cuda_graph_replays_it(erases: bool) -> None:
    sizes: dict[str, Any] = {"seq_len": 150, "dtype": torch.bfloat16, "device": "cuda", "dims": (64, 64)}
    given = detached(draw("diagonal", packed=True, erases=erases, **sizes))
    wanted = chunk_kernels(given, scale=0.3)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = chunk_kernels(given, scale=0.3)
    graph.replay()
    assert all(torch.equal(x, y) for x, y in zip(results, wanted, strict=True))
