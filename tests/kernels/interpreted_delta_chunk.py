"""The chunk form of the delta family under Triton's interpreter, on the CPU, against the float64 oracle.

Run as ``interpreted_delta.py`` is, which has the oracle. A chunk is 32 rows here, tiles are 16 columns, and a sequence
of one head is cut into segments from 257 rows on, so these sizes reach every tail, border and segment.

Shapes: as there; C chunk.
"""

import functools
import sys
from collections.abc import Callable, Collection
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parent))

from interpreted_delta import (  # noqa: E402
    DECAYS,
    ERASING,
    FREE,
    SCALE,
    TIED,
    Shape,
    between_nans,
    draw_delta,
    every_second,
    laid_out,
    oracle,
    transposed,
)

from statemix import scan  # noqa: E402
from statemix.harness import CATALOGUE, Sizes, check_transition  # noqa: E402
from statemix.kernels import ScanOperands, chunk_kernels, launch_config  # noqa: E402
from statemix.kernels.launch_config import DeltaConfig, Tiles  # noqa: E402
from statemix.kernels.spans import batch_spans  # noqa: E402
from statemix.kernels.triton import delta  # noqa: E402
from statemix.kernels.triton.intra_chunk.ut_transform import ut_transform  # noqa: E402
from statemix.kernels.triton.primitives.cumulative_gate import cumulative_gate  # noqa: E402
from statemix.transitions import BlockDiagonal, Householder, Product, ScalarGate  # noqa: E402

FLOAT32 = 1e-5, 1e-4  # of results and of gradients, in norm: sums of a hundred terms
FLOAT16 = 8e-3, 2e-2  # chunk states, pseudo-values and products are rounded to 16 bits
ONE_HEAD = (1, 1, 1, 1)

Results = dict[str, Tensor]
Run = Callable[[ScanOperands], tuple[Tensor, Tensor]]

kernels: Run = functools.partial(chunk_kernels, scale=SCALE)
definition: Run = functools.partial(oracle, scale=SCALE)


def leaves(operands: ScanOperands) -> Results:
    return {name: x for name, x in operands._asdict().items() if isinstance(x, Tensor) and x.requires_grad}


def upstream(results: tuple[Tensor, ...]) -> list[Tensor]:
    """Multiples of 1/8, which every dtype holds."""
    generator = torch.Generator().manual_seed(1)
    return [(torch.randint(-16, 17, x.shape, generator=generator) / 8).to(x.dtype) for x in results]


def differentiate(operands: ScanOperands, run: Run, loss: str = "both") -> Results:
    """Results and the gradient of every leaf for a loss on the output, the final state or both."""
    results, wanted = run(operands), leaves(operands)
    chosen = {"both": slice(None), "output": slice(0, 1), "state": slice(1, 2)}[loss]
    grads = torch.autograd.grad(
        results[chosen], [*wanted.values()], upstream(results)[chosen], allow_unused=True, materialize_grads=True
    )
    return {"output": results[0], "final_state": results[1]} | dict(zip(wanted, grads, strict=True))


def expect_close(got: Results, wanted: Results, limits: tuple[float, float] = FLOAT32) -> None:
    for name, exact in wanted.items():
        limit = limits[name not in ("output", "final_state")]
        error, size = (got[name].double() - exact.double()).norm(), exact.double().norm()
        assert error <= limit * size, f"{name}: {error:.3g} of {size:.3g}"


def expect_equal(got: Results, wanted: Results) -> None:
    for name, x in wanted.items():
        assert torch.equal(got[name], x), f"{name}: {(got[name] - x).abs().max():.3g}"


def expect_definition(operands: ScanOperands, limits: tuple[float, float] = FLOAT32, loss: str = "both") -> Results:
    got = differentiate(operands, kernels, loss)
    expect_close(got, differentiate(operands, definition, loss), limits)
    return got


def decays(*quick: str) -> list[Any]:
    """Every decay; those that are not ``quick`` in `make test-all` alone, where a case takes seconds."""
    return [decay if decay in quick else pytest.param(decay, marks=pytest.mark.slow) for decay in DECAYS]


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize(("num_steps", "seq_len"), [(1, 35), (2, 18), (3, 12)])
def test_operands(decay: str, num_steps: int, seq_len: int) -> None:
    """Tied and free, and reading before the decay; a token whose rows lie in two chunks."""
    for absent in (TIED, FREE):
        for reads_before_decay in (False, True) if decay != "none" else (False,):
            operands = draw_delta(
                decay,
                seq_len=seq_len,
                num_steps=num_steps,
                heads=ONE_HEAD,
                absent=absent,
                reads_before_decay=reads_before_decay,
            )
            expect_definition(operands)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("absent", [("a", "erase_beta"), ("write", "initial_state"), ("a", "erase_beta", "write")])
def test_operands_absent(decay: str, absent: Collection[str]) -> None:
    expect_definition(draw_delta(decay, seq_len=17, num_steps=2, heads=ONE_HEAD, absent=absent))


# T, (HQ, HA, HB, HV), (K, V), whether a is b, what the loss is on
SHAPES = [
    (1, ONE_HEAD, (4, 16), True, "both"),
    (7, (2, 4, 1, 4), (12, 4), False, "output"),
    (33, ONE_HEAD, (1, 40), False, "both"),
    (40, ONE_HEAD, (24, 20), True, "state"),
    (65, (1, 2, 1, 2), (4, 8), False, "both"),
    (3, ONE_HEAD, (140, 20), True, "both"),
]


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize(("seq_len", "heads", "dims", "is_tied", "loss"), SHAPES)
def test_shapes(decay: str, seq_len: int, heads: Any, dims: Any, is_tied: bool, loss: str) -> None:
    operands = draw_delta(decay, seq_len=seq_len, heads=heads, dims=dims, absent=TIED if is_tied else FREE)
    expect_definition(operands, loss=loss)


@pytest.mark.parametrize("decay", decays("scalar"))
def test_blocks_share_a_value_and_add_up(decay: str) -> None:
    expect_definition(draw_delta(decay, batch=2, seq_len=35, heads=(2, 2, 1, 2), dims=(16, 20), blocks=2))
    operands = draw_delta(
        decay,
        seq_len=12,
        num_steps=2,
        heads=(3, 3, 3, 3),
        dims=(12, 4),
        documents=[0, 0, 5, 11],
        absent=("write",),
        reads_before_decay=True,
        blocks=3,
    )
    got = expect_definition(operands)
    expect_equal(differentiate(operands, functools.partial(kernels, recompute=True)), got)


@pytest.mark.parametrize("decay", decays("diagonal"))
def test_blocks_in_16_bits_and_memory(decay: str) -> None:
    operands = draw_delta(decay, seq_len=35, heads=(2, 2, 2, 2), dims=(20, 8), blocks=2, dtype=torch.float16)
    got = expect_definition(operands, FLOAT16)
    torch.use_deterministic_algorithms(True)  # torch.empty gives NaN
    try:
        expect_equal(differentiate(laid_out(operands, between_nans), kernels), got)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.slow
def test_blocks_in_segments() -> None:
    operands = draw_delta("none", seq_len=262, heads=(2, 2, 2, 2), dims=(8, 4), blocks=2, documents=[0, 3, 260])
    expect_segments(operands, loss="both")


@pytest.mark.parametrize("decay", DECAYS)
def test_batch_and_float16(decay: str) -> None:
    expect_definition(draw_delta(decay, batch=2, seq_len=9, heads=ONE_HEAD))
    narrow = draw_delta(decay, seq_len=37, heads=ONE_HEAD, dims=(20, 16), dtype=torch.float16, absent=FREE)
    expect_definition(narrow, FLOAT16)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("size", [16, 64])
def test_chunk_sizes(decay: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    row = DeltaConfig.uniform(size, Tiles(32, 4, 1), fill=4)
    monkeypatch.setitem(launch_config._DELTA_INTERPRETER, 512, row)
    expect_definition(draw_delta(decay, seq_len=35, num_steps=2, heads=ONE_HEAD, dims=(16, 40)))


# empty documents, first, twice, inside and last; documents that start inside a chunk of 32; rows after the last one
PACKED = [(1, TIED, [0, 0, 5, 5, 40, 45], 47), (2, FREE, [0, 10, 27, 27], 27)]


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize(("num_steps", "absent", "documents", "seq_len"), PACKED)
def test_packed(decay: str, num_steps: int, absent: Collection[str], documents: list[int], seq_len: int) -> None:
    operands = draw_delta(
        decay, seq_len=seq_len, num_steps=num_steps, heads=ONE_HEAD, documents=documents, absent=absent
    )
    got = expect_definition(operands)
    for name in {"output", *leaves(operands)} - {"initial_state"}:
        count = documents[-1] * (got[name].shape[1] // seq_len)
        assert torch.equal(got[name][:, count:], torch.zeros_like(got[name][:, count:])), name
    initial, gradient = operands.initial_state, upstream((got["output"], got["final_state"]))[1]
    assert initial is not None
    for n in (n for n, (start, end) in enumerate(pairwise(documents)) if start == end):
        assert torch.equal(got["final_state"][n], initial[n]) and torch.equal(got["initial_state"][n], gradient[n])


@pytest.mark.parametrize("decay", DECAYS)
def test_packed_rows_of_no_document_may_be_anything(decay: str) -> None:
    for heads, blocks in ((ONE_HEAD, 1), ((2, 2, 2, 2), 2)):
        operands = draw_delta(decay, seq_len=10, heads=heads, blocks=blocks, documents=[0, 7])
        for x in leaves(operands).values():
            if x.ndim > 2 and x.shape[1] == 10:
                x.data[:, 7:] = torch.nan
        output, final_state = kernels(operands)
        (output.sum() + final_state.sum()).backward()
        for name, x in leaves(operands).items():
            assert x.grad is not None and not x.grad.isnan().any(), name


@pytest.mark.parametrize("decay", DECAYS)
def test_shapes_without_a_token_leave_the_state(decay: str) -> None:
    for blocks in (1, 2):
        operands = draw_delta(decay, seq_len=0, blocks=blocks)
        output, final_state = kernels(operands)
        assert output.shape == (1, 0, 2 // blocks, 12) and torch.equal(final_state, operands.initial_state)


@pytest.mark.parametrize("decay", decays("none", "diagonal"))
def test_segments(decay: str) -> None:
    expect_segments(draw_delta(decay, seq_len=290, heads=ONE_HEAD, dims=(8, 4)), loss="both")


@pytest.mark.parametrize("decay", decays("scalar"))
def test_segments_packed(decay: str) -> None:
    """Without initial and final states under one decay, so that both joins start from nothing too."""
    absent, loss = (("initial_state",), "output") if decay == "scalar" else (FREE, "both")
    operands = draw_delta(
        decay,
        seq_len=142,
        num_steps=2,
        heads=ONE_HEAD,
        dims=(8, 4),
        documents=[0, 0, 4, 140],
        absent=absent,
        reads_before_decay=True,
    )
    expect_segments(operands, loss=loss)


def expect_segments(operands: ScanOperands, loss: str) -> None:
    """The definition, and bit by bit the same when backward walks the segments once more."""
    assert delta._plan(operands).partition.segments is not None
    got = expect_definition(operands, loss=loss)
    expect_equal(differentiate(operands, functools.partial(kernels, recompute=True), loss), got)


LEVELS = torch.tensor([0.0, -1e-4, -5.0, -20.0, -80.0, -torch.inf])


def mixed(shape: Shape) -> Tensor:
    """Levels that differ from token to token, head to head and channel to channel."""
    return LEVELS[torch.arange(torch.Size(shape).numel()).view(shape) * 7 % 11 % len(LEVELS)].clone()


def resets(shape: Shape) -> Tensor:
    token = torch.arange(shape[1]).view(1, -1, *[1] * (len(shape) - 2))
    return torch.where(token % 8 == 7, -80.0, -1e-4).expand(shape).clone()


def halves(shape: Shape) -> Tensor:
    """-8 in every second channel or token, 0 in the others."""
    return -8.0 * (torch.arange(torch.Size(shape).numel()).view(shape) % 2)


def one_strong(shape: Shape) -> Tensor:
    return torch.full(shape, -0.01).index_fill(1, torch.tensor([9]), -20.0)


@pytest.mark.parametrize("decay", ["scalar", "diagonal"])
@pytest.mark.parametrize("level", [-5.0, -20.0, -80.0])
def test_gates(decay: str, level: float) -> None:
    expect_definition(draw_delta(decay, heads=ONE_HEAD, gate=lambda shape: torch.full(shape, level)))


@pytest.mark.parametrize("decay", ["scalar", "diagonal"])
@pytest.mark.parametrize("gate", [mixed, resets, halves, one_strong])
def test_gates_mixed(decay: str, gate: Callable[[Shape], Tensor]) -> None:
    for reads_before_decay in (False, True):
        operands = draw_delta(
            decay, seq_len=37, heads=ONE_HEAD, dims=(16, 4), gate=gate, reads_before_decay=reads_before_decay
        )
        expect_definition(operands)


@pytest.mark.parametrize("decay", ["scalar", "diagonal"])
def test_gates_of_zero_are_no_gates(decay: str) -> None:
    operands = draw_delta(decay, heads=ONE_HEAD, gate=torch.zeros)
    without = differentiate(operands._replace(log_decay=None), kernels)
    expect_close(differentiate(operands, kernels), without, (1e-6, 1e-6))


@pytest.mark.parametrize("beta", [1.0, 2.0])
def test_equal_keys(beta: float) -> None:
    """o_t = v_t for beta 1, 2 v_t - o_{t-1} for beta 2: powers of A would reach 1e20."""
    operands = draw_delta("none", seq_len=100, heads=ONE_HEAD, absent=("a", "initial_state"))
    key = torch.full_like(operands.q, 0.25)  # of 16 channels: its length is 1 in float32 too
    assert operands.erase_beta is not None
    beta_of_all = torch.full_like(operands.erase_beta, beta)
    operands = operands._replace(q=key, b=key, erase_beta=beta_of_all, write=beta_of_all)
    output = torch.zeros(1, 1, 1, operands.v.shape[-1], dtype=torch.float64)
    for t, v in enumerate(operands.v.detach().double().split(1, dim=1)):
        output = torch.cat([output, (1 - beta) * output[:, t : t + 1] + beta * v], dim=1)
    expect_close({"output": chunk_kernels(operands, scale=1.0)[0].detach()}, {"output": output[:, 1:]})


@pytest.mark.parametrize(
    ("decay", "reads_before_decay"), [("none", False), ("scalar", False), ("scalar", True), ("diagonal", True)]
)
def test_counts_are_expanded_sequences(decay: str, reads_before_decay: bool) -> None:
    """n rows a token are n tokens, of which the first decays and the last is read."""
    operands = draw_delta(
        decay, seq_len=15, num_steps=3, heads=ONE_HEAD, absent=FREE, reads_before_decay=reads_before_decay
    )

    def expanded(operands: ScanOperands) -> tuple[Tensor, Tensor]:
        n, gate = operands.num_steps, operands.log_decay
        gate = None if gate is None else alone(gate, 0, n)
        output, state = kernels(operands._replace(q=alone(operands.q, n - 1, n), log_decay=gate))
        return output[:, n - 1 :: n], state

    expect_close(differentiate(operands, expanded), differentiate(operands, kernels))


def alone(x: Tensor, step: int, num_steps: int) -> Tensor:
    """x [B, T, ...] as the step of n of every token, [B, T n, ...], zero elsewhere."""
    return torch.stack([x if j == step else torch.zeros_like(x) for j in range(num_steps)], dim=2).flatten(1, 2)


@pytest.mark.parametrize("decay", DECAYS)
def test_recomputed(decay: str) -> None:
    """What is computed once more is the same bit for bit, through autograd and without it."""
    operands = draw_delta(decay, seq_len=24, num_steps=2, heads=ONE_HEAD, documents=[0, 0, 20, 20], absent=FREE)
    wanted = differentiate(operands, kernels)
    expect_equal(differentiate(operands, functools.partial(kernels, recompute=True)), wanted)
    with torch.no_grad():
        output, final, saved = delta.forward(operands, scale=SCALE, save=False)
        expect_equal(wanted, {"output": output, "final_state": final})
        grads = delta.backward(*upstream((output, final)), operands, saved, scale=SCALE, needs_decay_grad=False)
    assert saved is None and grads.log_decay is None
    expect_equal(wanted, {name: x for name, x in grads._asdict().items() if x is not None})


@pytest.mark.parametrize("decay", DECAYS)
def test_future(decay: str) -> None:
    """Later tokens change nothing earlier, bit for bit: a gate of -200 to come leaves no trace."""
    for seq_len, num_steps, absent, present in ((20, 2, TIED, 6), (40, 1, FREE, 35)):
        sizes: dict[str, Any] = {"seq_len": seq_len, "num_steps": num_steps, "heads": ONE_HEAD, "dims": (16, 4)}
        given, other = (draw_delta(decay, absent=absent, **sizes) for _ in range(2))
        expect_equal(prefix(spliced(given, other, present), present), prefix(given, present))


def spliced(given: ScanOperands, other: ScanOperands, present: int) -> ScanOperands:
    """The first tokens of ``given``, then those of ``other`` with values and gates 200 times as large."""
    changed = {}
    for name, x in leaves(given).items():
        if name != "initial_state":
            count, later = present * (x.shape[1] // given.q.shape[1]), getattr(other, name).detach()
            later = 200 * later if name in ("v", "log_decay") else later
            changed[name] = torch.cat([x.detach()[:, :count], later[:, count:]], dim=1).requires_grad_()
    return given._replace(**changed)


def prefix(operands: ScanOperands, present: int) -> Results:
    """Outputs and gradients of the first tokens for a loss on those outputs."""
    output, wanted = kernels(operands)[0][:, :present], leaves(operands)
    grads = torch.autograd.grad(output, [*wanted.values()], upstream((output,)))
    found = {"output": output}
    for (name, x), grad in zip(wanted.items(), grads, strict=True):
        found[name] = grad if name == "initial_state" else grad[:, : present * (x.shape[1] // operands.q.shape[1])]
    return found


@pytest.mark.parametrize("decay", DECAYS)
def test_heads(decay: str) -> None:
    """Permuting the heads and the rows of a batch permutes gradients bit for bit.

    Not so of a BLAS product over a whole batch. Here every head of a row is a program of its own, which the interpreter
    runs on tiles of the same shape, wherever it stands.
    """

    def hard(shape: Shape) -> Tensor:
        by_head = torch.tensor([0.0, -10.0])
        return (by_head[:, None] if len(shape) == 4 else by_head).expand(shape).clone()

    operands = draw_delta(decay, batch=2, seq_len=5, heads=(2, 2, 2, 2), dims=(4, 4), absent=FREE, gate=hard)
    axes = {name: (0, 1) if name == "initial_state" else (0, 2) for name in leaves(operands)}
    flipped = {name: x.detach().flip(axes[name]).requires_grad_() for name, x in leaves(operands).items()}
    got, wanted = (differentiate(x, squared) for x in (operands._replace(**flipped), operands))
    expect_equal({name: got[name].flip(axis) for name, axis in axes.items()}, {name: wanted[name] for name in axes})


def squared(operands: ScanOperands) -> tuple[Tensor, Tensor]:
    """Weighed as single numbers: a loss that has no order of heads and rows of its own."""
    output, state = kernels(operands)
    return output.square().sum(), state.square().sum()


@pytest.mark.parametrize("decay", DECAYS)
def test_memory(decay: str) -> None:
    """What lies behind or before a tensor, or where nothing was written yet, reaches no result; nor does the layout."""
    operands = draw_delta(
        decay, seq_len=8, num_steps=2, heads=ONE_HEAD, dims=(20, 12), documents=[0, 2, 7], absent=FREE
    )
    wanted = differentiate(operands, kernels)
    for layout in (every_second, transposed):
        expect_equal(differentiate(laid_out(operands, layout), kernels), wanted)
    torch.use_deterministic_algorithms(True)  # torch.empty gives NaN
    try:
        expect_equal(differentiate(laid_out(operands, between_nans), kernels), wanted)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("decay", DECAYS)
def test_upstream_gradients_may_be_views(decay: str) -> None:
    operands = draw_delta(decay, seq_len=9, heads=ONE_HEAD)
    results, tensors = kernels(operands), [*leaves(operands).values()]
    views = (
        [torch.randn(x.shape[::-1]).permute(3, 2, 1, 0) for x in results],
        [x.new_ones(()).expand_as(x) for x in results],
    )
    for view in views:
        got, wanted = (
            torch.autograd.grad(results, tensors, x, retain_graph=True) for x in (view, [y.contiguous() for y in view])
        )
        assert all(torch.equal(x, y) for x, y in zip(got, wanted, strict=True))


@pytest.mark.parametrize("decay", ["none", "scalar"])
@pytest.mark.parametrize("size", [16, 32, 64])
@pytest.mark.parametrize("reads_before_decay", [False, True])
def test_inverse(decay: str, size: int, reads_before_decay: bool) -> None:
    """T, P T and T^T (b rest) of a whole chunk and of one that ends early; random keys, then equal ones."""
    operands = draw_delta(
        decay, seq_len=2 * size - 5, heads=ONE_HEAD, absent=("a",), reads_before_decay=reads_before_decay
    )
    equal = F.normalize(torch.ones_like(operands.b), dim=-1)
    for given in (operands, operands._replace(b=equal, erase_beta=torch.full_like(operands.erase_beta, 2.0))):  # type: ignore[arg-type]
        with torch.no_grad():
            expect_ut_transform(given, size)


def expect_ut_transform(operands: ScanOperands, size: int) -> None:
    chunks, gate = batch_spans(1, operands.q.shape[1], size), operands.log_decay
    prepared = None if gate is None else cumulative_gate(gate, chunks)
    transform = ut_transform(
        *(operands, None, prepared, chunks),
        scale=SCALE,
        tiles=Tiles(16, 4, 1),
        max_registers=None,
        needs_L_inv=True,
    )
    assert transform.L_inv is not None and operands.erase_beta is not None
    if gate is None:
        assert transform.L_inv.abs().max() <= 2 + 1e-4, "unit keys and erase betas up to 2 keep the inverse at 2"
    gates = torch.zeros(operands.q.shape[:2]) if gate is None else gate[..., 0]
    q, b, beta, gates = (
        x[0].double().split(size) for x in (operands.q[:, :, 0], operands.b[:, :, 0], operands.erase_beta, gates)
    )
    for c, key in enumerate(transform.key[0, :, 0].split(size)):
        total, count = gates[c].cumsum(0), len(key)
        read = total - gates[c] if operands.reads_before_decay else total
        A_kk = (beta[c] * b[c] @ b[c].mT * (read[:, None] - total).exp()).tril(-1)
        L_inv = torch.linalg.inv(torch.eye(count, dtype=torch.float64) + A_kk)
        A_qk = (SCALE * q[c] @ b[c].mT * (total[:, None] - total).exp()).tril()
        wanted = {
            "L^-1": L_inv,
            "A_qk L^-1": A_qk @ L_inv,
            "key": L_inv.mT @ (b[c] * (total[-1] - total).exp()[:, None]),
        }
        got = {
            "L^-1": transform.L_inv[c, 0, :count, :count],
            "A_qk L^-1": transform.scores[c, 0, :count, :count],
            "key": key,
        }
        expect_close(got, wanted, (1e-5, 1e-5))


@pytest.mark.parametrize("name", ERASING)
def test_scan(name: str) -> None:
    seq_len, num_steps = 21, 1 if "before" in name else 2
    k, u = (F.normalize(torch.randn(1, seq_len, num_steps, 1, 6), dim=-1).requires_grad_() for _ in "ku")
    tensors = {
        "q": torch.randn(1, seq_len, 1, 6),
        "v": torch.randn(1, seq_len, num_steps, 2, 5),
        "beta": torch.rand(1, seq_len, num_steps, 2),
        "write": torch.rand(1, seq_len, num_steps, 2),
        "gate": -torch.rand(1, seq_len, 2, 6),
    }
    q, v, beta, write, gate = (x.requires_grad_() for x in tensors.values())
    found = []
    for backend in ("triton", "torch"):
        transition = ERASING[name](k, u, 2 * beta, gate)
        results = scan(q, k, v, transition, write=write, scale=SCALE, form="chunk", backend=backend)  # type: ignore[arg-type]
        grads = torch.autograd.grad(
            results, [*tensors.values(), k, u], upstream(results), allow_unused=True, materialize_grads=True
        )
        found.append(
            {"output": results[0], "final_state": results[1]} | dict(zip([*tensors, "k", "u"], grads, strict=True))
        )
    expect_close(*found)


def test_scan_of_blocks_is_one_of_heads_summed() -> None:
    seq_len, heads, blocks, key_dim = 21, 2, 2, 4
    q, k = torch.randn(1, seq_len, 1, blocks, key_dim), torch.randn(1, seq_len, 1, blocks, key_dim)
    v, gate = torch.randn(1, seq_len, heads, 5), -torch.rand(1, seq_len, heads, blocks)
    beta, write = 2 * torch.rand(1, seq_len, heads, blocks), torch.rand(1, seq_len, heads, blocks)
    tensors = [x.requires_grad_() for x in (q, k, v, gate, beta, write)]
    unit = F.normalize(k, dim=-1)

    def in_blocks() -> tuple[Tensor, Tensor]:
        key = unit.flatten(3)
        transition = BlockDiagonal(Product(ScalarGate(gate), Householder(key, beta)), blocks)
        return scan(q.flatten(3), key, v, transition, write=write, scale=SCALE, form="chunk", backend="triton")

    def in_heads() -> tuple[Tensor, Tensor]:
        query, key = (x.expand(-1, -1, heads, -1, -1).flatten(2, 3) for x in (q, unit))
        transition = Product(ScalarGate(gate.flatten(2)), Householder(key, beta.flatten(2)))
        value = v.repeat_interleave(blocks, dim=2)
        output, state = scan(
            query, key, value, transition, write=write.flatten(2), scale=SCALE, form="chunk", backend="triton"
        )
        return output.unflatten(2, (heads, blocks)).sum(3), state.unflatten(1, (heads, blocks)).movedim(2, 3).flatten(3)

    found = []
    for run in (in_blocks, in_heads):
        results = run()
        grads = torch.autograd.grad(results, tensors, upstream(results), retain_graph=True)
        found.append(
            dict(
                zip(("output", "final_state", "q", "k", "v", "gate", "beta", "write"), [*results, *grads], strict=True)
            )
        )
    expect_close(*found)


# Checks that the tests above do not make.
HARNESS = {
    "householder_count_3": ("packed_equals_separate",),
    "two_directions": ("forms_equal_the_definition",),
    "diagonal_gated_householder": ("splits_carry_the_state",),
}


@pytest.mark.parametrize("subject", HARNESS)
def test_scan_passes_the_harness(subject: str) -> None:
    by_triton = functools.partial(scan, backend="triton")
    options: dict[str, Any] = {"dtype": torch.float32, "forms": ("chunk",), "sizes": Sizes(1, 17, 1, 2, 4, 3)}
    report = check_transition(CATALOGUE[subject], scan=by_triton, only=HARNESS[subject], **options)
    assert report.ok, f"\n{report}"
