"""The Triton kernels of the delta family under Triton's interpreter, on the CPU, against float64.

Run in a process with TRITON_INTERPRET=1, one group a process: ``test_interpreted_kernels.py`` does. ``draw_delta``
makes operands, ``oracle`` is what every kernel of the family must give for them, with its gradients.

Shapes: B batch, T time, n micro-steps a token, R = T n rows, HQ HA HB HV heads, K key_dim, V value_dim, N sequences.
"""

from collections.abc import Callable, Collection
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from statemix import scan
from statemix.kernels import ScanOperands, scan_operands
from statemix.kernels.triton.recurrent import recurrent_forward
from statemix.transitions import DiagonalGate, Householder, ScalarGate, Transition

DECAYS = ("none", "scalar", "diagonal")
SCALE = 0.3
TIED = ("a",)  # absent operands: a is b

Shape = tuple[int, ...]


def draw_delta(
    decay: str,
    *,
    batch: int = 1,
    seq_len: int = 37,
    num_steps: int = 1,
    heads: tuple[int, int, int, int] = (1, 1, 1, 2),
    dims: tuple[int, int] = (16, 12),
    documents: list[int] | None = None,
    absent: Collection[str] = TIED,
    reads_before_decay: bool = False,
    dtype: torch.dtype = torch.float32,
    gate_dtype: torch.dtype = torch.float32,
    gate: Callable[[Shape], Tensor] = lambda shape: -torch.rand(shape),
    blocks: int = 1,
) -> ScanOperands:
    """Operands of a scan, leaves that require gradients.

    a and b are unit vectors. An erasure along b itself has norm 1 for rates up to 2; others make the state grow, so
    their rates stay below 1.

    Args:
        heads: HQ, HA, HB, HV.
        dims: K, V.
        absent: names of operands that are None, of a, erase_beta, write and initial_state.
        gate_dtype: of erase_beta, write and log_decay.
        gate: log_decay of a shape.
        blocks: of the HV heads that share a value.
    """
    (num_q, num_a, num_b, num_v), (key_dim, value_dim) = heads, dims
    num_rows, num_states = seq_len * num_steps, batch if documents is None else len(documents) - 1
    gates = {"scalar": (batch, seq_len, num_v), "diagonal": (batch, seq_len, num_v, key_dim)}

    def leaf(x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(dtype).requires_grad_()

    def unless_absent(name: str, x: Tensor, dtype: torch.dtype) -> Tensor | None:
        return None if name in absent else leaf(x, dtype)

    highest_rate = 2.0 if "a" in absent else 1.0
    return ScanOperands(
        q=leaf(torch.randn(batch, seq_len, num_q, key_dim), dtype),
        a=unless_absent("a", F.normalize(torch.randn(batch, num_rows, num_a, key_dim), dim=-1), dtype),
        b=leaf(F.normalize(torch.randn(batch, num_rows, num_b, key_dim), dim=-1), dtype),
        v=leaf(torch.randn(batch, num_rows, num_v // blocks, value_dim), dtype),
        erase_beta=unless_absent("erase_beta", highest_rate * torch.rand(batch, num_rows, num_v), gate_dtype),
        write=unless_absent("write", torch.rand(batch, num_rows, num_v), gate_dtype),
        log_decay=leaf(gate(gates[decay]), gate_dtype) if decay in gates else None,
        initial_state=unless_absent("initial_state", torch.randn(num_states, num_v, value_dim, key_dim), torch.float32),
        cu_seqlens=None if documents is None else torch.tensor(documents, dtype=torch.int32),
        erases=True,
        reads_before_decay=reads_before_decay,
        blocks=blocks,
    )


def oracle(operands: ScanOperands, scale: float) -> tuple[Tensor, Tensor]:
    """The equation of ``ScanOperands``, one micro-step after another in float64: output and final state.

    Autograd goes through it to every operand, and the gradients arrive in the operands' own dtypes.
    """
    rows = _filled(operands)
    if operands.cu_seqlens is None:
        output, state = _recurrence(rows, scale)
    else:
        bounds, seq_len = operands.cu_seqlens.tolist(), operands.q.shape[1]
        parts = [_recurrence(_document(rows, n, start, end), scale) for n, (start, end) in enumerate(pairwise(bounds))]
        outputs, states = zip(*parts, strict=True)
        after_the_last = outputs[0].new_zeros(1, seq_len - bounds[-1], *outputs[0].shape[2:])
        output, state = torch.cat([*outputs, after_the_last], dim=1), torch.cat(states)
    return output.unflatten(2, (-1, operands.blocks)).sum(3), state


def _filled(operands: ScanOperands) -> ScanOperands:
    """The same scan in float64, with every operand but ``cu_seqlens`` there, and all of them for HV heads.

    a, b, v, erase_beta and write become [B, T, n, HV, ...], log_decay [B, T, HV, 1 or K].
    """
    q, a, b, v, beta, write, log_decay, initial, cu_seqlens, _, reads_before_decay, _ = operands
    (batch, seq_len), heads = q.shape[:2], operands.num_heads

    def one_each(x: Tensor) -> Tensor:
        return x.double().repeat_interleave(heads // x.shape[2], dim=2)

    def by_token(x: Tensor) -> Tensor:
        return one_each(x).unflatten(1, (seq_len, operands.num_steps))

    ones = v.new_ones(v.shape[:3], dtype=torch.float64)
    gate = v.new_zeros(batch, seq_len, heads, dtype=torch.float64) if log_decay is None else log_decay.double()
    return ScanOperands(
        q=one_each(q),
        a=by_token(b if a is None else a),
        b=by_token(b),
        v=by_token(v),
        erase_beta=by_token(ones if beta is None else beta),
        write=by_token(ones if write is None else write),
        log_decay=gate if gate.ndim == 4 else gate.unsqueeze(-1),
        initial_state=(torch.zeros_like(operands.empty_state()) if initial is None else initial).double(),
        cu_seqlens=cu_seqlens,
        erases=True,
        reads_before_decay=reads_before_decay,
    )


def _document(rows: ScanOperands, n: int, start: int, end: int) -> ScanOperands:
    """Document n alone."""
    *by_token, initial, _, erases, reads_before_decay, _ = rows
    return ScanOperands(*(x[:, start:end] for x in by_token), initial[n : n + 1], None, erases, reads_before_decay)


def _recurrence(rows: ScanOperands, scale: float) -> tuple[Tensor, Tensor]:
    """``oracle`` for what ``_filled`` gives, without documents."""
    *by_token, state, _, _, reads_before_decay, _ = rows
    outputs = []
    for q, a, b, v, beta, write, log_decay in zip(*(x.unbind(1) for x in by_token), strict=True):
        undecayed, state = state, state * log_decay.exp().unsqueeze(-2)
        for j in range(b.shape[1]):
            read = undecayed if j == 0 and reads_before_decay else state
            erased = torch.einsum("bhvk,bhk->bhv", read, a[:, j])
            u = write[:, j, :, None] * v[:, j] - beta[:, j, :, None] * erased
            state = state + u.unsqueeze(-1) * b[:, j].unsqueeze(-2)
        outputs.append(scale * torch.einsum("bhvk,bhk->bhv", state, q))
    nothing = rows.v.new_empty(rows.v.shape[0], 0, *rows.v.shape[3:])
    return torch.stack(outputs, dim=1) if outputs else nothing, state


ERASING: dict[str, Callable[..., Transition]] = {
    "gate, then n tied steps": lambda k, u, beta, gate: ScalarGate(gate[..., 0]) @ Householder(k, beta),
    "gate, then n free steps": lambda k, u, beta, gate: DiagonalGate(gate) @ Householder(u, beta),
    "a step that reads before the gate": lambda k, u, beta, gate: (
        Householder(u[:, :, 0], beta[:, :, 0]) @ DiagonalGate(gate)
    ),
}


@pytest.mark.parametrize("name", ERASING)
def test_oracle_is_the_definition(name: str) -> None:
    """``scan`` loops over ``Transition.apply``, the oracle over the micro-steps that the transition lowers to."""
    batch, seq_len, num_steps, num_heads, heads, key_dim = 2, 9, 1 if "before" in name else 3, 2, 4, 6
    double: dict[str, Any] = {"dtype": torch.float64}
    q = torch.randn(batch, seq_len, num_heads, key_dim, **double)
    k, u = (F.normalize(torch.randn(batch, seq_len, num_steps, num_heads, key_dim, **double), dim=-1) for _ in "ku")
    v = torch.randn(batch, seq_len, num_steps, heads, 5, **double)
    beta, write = (torch.rand(batch, seq_len, num_steps, heads, **double) for _ in range(2))
    transition = ERASING[name](k, u, 2 * beta, -torch.rand(batch, seq_len, heads, key_dim, **double))
    wanted = scan(q, k, v, transition, write=write, form="recurrent", scale=SCALE, backend="torch")
    operands = scan_operands(q, k, v, transition.lower(), write=write)
    for x, y in zip(oracle(operands, SCALE), wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def expect_recurrent(operands: ScanOperands, limit: float = 1e-6) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        got, wanted = recurrent_forward(operands, scale=SCALE), oracle(operands, SCALE)
    assert got[0].dtype == operands.q.dtype and got[1].dtype == torch.float32
    for name, x, y in zip(("output", "final_state"), got, wanted, strict=True):
        assert x.shape == y.shape
        error, size = (x.double() - y).norm(), y.norm()
        assert error <= limit * size, f"{name}: {error:.3g} of {size:.3g}"
    return got


FREE = ()
ABSENT = [TIED, FREE, ("a", "erase_beta"), ("write", "initial_state"), ("a", "erase_beta", "write", "initial_state")]


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("num_steps", [1, 2, 3])
@pytest.mark.parametrize("absent", ABSENT, ids=lambda names: "no " + ", ".join(names) if names else "all")
def test_recurrent_operands(decay: str, num_steps: int, absent: Collection[str]) -> None:
    for reads_before_decay in (False, True):
        operands = draw_delta(
            decay, seq_len=5, num_steps=num_steps, absent=absent, reads_before_decay=reads_before_decay
        )
        expect_recurrent(operands)


# T, (HQ, HA, HB, HV), (K, V); K above 256 leaves blocks of V of 8 rows, so V = 40 takes several
SHAPES = [
    (1, (1, 1, 1, 1), (4, 16)),
    (7, (2, 6, 3, 6), (24, 40)),
    (5, (4, 1, 2, 4), (40, 24)),
    (3, (1, 1, 1, 2), (300, 40)),
    (2, (1, 1, 1, 1), (512, 20)),
    (0, (1, 1, 1, 2), (16, 4)),
]


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize(("seq_len", "heads", "dims"), SHAPES)
def test_recurrent_shapes(decay: str, seq_len: int, heads: Any, dims: Any) -> None:
    """Heads that divide HV in different ways for q, a and b; odd sizes; several blocks of V."""
    expect_recurrent(draw_delta(decay, batch=2, seq_len=seq_len, heads=heads, dims=dims, num_steps=2, absent=()))
    expect_recurrent(draw_delta(decay, seq_len=seq_len, heads=heads, dims=dims, absent=("a", "initial_state")))
    blocks = heads[3]  # of one head
    expect_recurrent(draw_delta(decay, seq_len=seq_len, heads=heads, dims=dims, blocks=blocks))


# empty documents, first, twice, inside and last; rows after the last one
PACKED = [([0, 0, 5, 5, 8, 14], 17), ([0, 4, 9, 9], 9), ([0, 1], 4)]


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize(("documents", "seq_len"), PACKED)
def test_recurrent_packed(decay: str, documents: list[int], seq_len: int) -> None:
    for num_steps, absent in ((1, TIED), (2, FREE)):
        blocks = num_steps  # two of the two heads
        operands = draw_delta(
            decay, seq_len=seq_len, num_steps=num_steps, documents=documents, absent=absent, blocks=blocks
        )
        output, final = expect_recurrent(operands)
        assert torch.equal(output[:, documents[-1] :], torch.zeros_like(output[:, documents[-1] :]))
        assert operands.initial_state is not None
        for n in (n for n, (start, end) in enumerate(pairwise(documents)) if start == end):
            assert torch.equal(final[n], operands.initial_state[n])


# dtypes of q, a, b and v, and of the gates; the error of one rounding. The interpreter truncates to bfloat16.
NARROW = [
    (torch.float16, torch.float32, 2.0**-11),
    (torch.float16, torch.float16, 2.0**-11),
    (torch.bfloat16, torch.bfloat16, 2.0**-7),
]


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize(("dtype", "gate_dtype", "rounding"), NARROW)
def test_recurrent_rounds_nothing_but_the_output(
    decay: str, dtype: torch.dtype, gate_dtype: torch.dtype, rounding: float
) -> None:
    operands = draw_delta(decay, seq_len=20, num_steps=2, dims=(24, 40), absent=(), dtype=dtype, gate_dtype=gate_dtype)
    _, final = expect_recurrent(operands, rounding)
    exact = oracle(operands, SCALE)[1].detach()
    assert (final.double() - exact).norm() <= 1e-6 * exact.norm()


@pytest.mark.parametrize("decay", ["scalar", "diagonal"])
@pytest.mark.parametrize("reads_before_decay", [False, True])
def test_recurrent_gates(decay: str, reads_before_decay: bool) -> None:
    """No decay, little of it and all of it, from token to token."""
    levels = torch.tensor([0.0, -1e-4, -5.0, -80.0, -torch.inf])

    def mixed(shape: Shape) -> Tensor:
        return levels[torch.arange(torch.Size(shape).numel()).view(shape) * 7 % 11 % len(levels)].clone()

    expect_recurrent(draw_delta(decay, seq_len=17, num_steps=2, gate=mixed, reads_before_decay=reads_before_decay))


@pytest.mark.parametrize("name", ["q", "a", "b", "v", "erase_beta", "write", "log_decay", "initial_state"])
def test_recurrent_shows_a_nan(name: str) -> None:
    """A NaN stands in the results where it does in those of the definition, and nowhere else."""
    for decay in ("scalar", "diagonal"):
        operands = draw_delta(decay, seq_len=5, num_steps=2, dims=(12, 5), absent=())
        poisoned = getattr(operands, name).detach().clone()
        poisoned.view(-1)[poisoned.numel() // 2] = torch.nan
        operands = operands._replace(**{name: poisoned})
        with torch.no_grad():
            results = zip(recurrent_forward(operands, scale=SCALE), oracle(operands, SCALE), strict=True)
        wrong = [x for x, y in results if not torch.equal(x.isnan(), y.isnan())]
        assert wrong == [] and oracle(operands, SCALE)[0].isnan().any()


@pytest.mark.parametrize("decay", DECAYS)
def test_recurrent_memory(decay: str) -> None:
    """What lies behind or before a tensor, or where nothing was written yet, reaches no result; nor does the layout."""
    operands = draw_delta(decay, seq_len=6, num_steps=2, dims=(20, 12), documents=[0, 2, 5], absent=())
    with torch.no_grad():
        wanted = recurrent_forward(operands, scale=SCALE)
        for layout in (between_nans, every_second, transposed):
            got = recurrent_forward(laid_out(operands, layout), scale=SCALE)
            assert all(torch.equal(x, y) for x, y in zip(got, wanted, strict=True)), layout.__name__
        torch.use_deterministic_algorithms(True)  # torch.empty gives NaN
        try:
            got = recurrent_forward(operands, scale=SCALE)
        finally:
            torch.use_deterministic_algorithms(False)
        assert all(torch.equal(x, y) for x, y in zip(got, wanted, strict=True))


def laid_out(operands: ScanOperands, layout: Callable[[Tensor], Tensor]) -> ScanOperands:
    def moved(x: Tensor | bool | None) -> Any:
        return layout(x.detach()).requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x

    return ScanOperands(*map(moved, operands))


def between_nans(x: Tensor) -> Tensor:
    nans = torch.full((640,), torch.nan, dtype=x.dtype)
    return torch.cat([nans, x.flatten(), nans])[640:-640].view(x.shape)


def every_second(x: Tensor) -> Tensor:
    return torch.stack([x, torch.full_like(x, 1e30)], dim=-1)[..., 0]


def transposed(x: Tensor) -> Tensor:
    return x.transpose(0, -1).contiguous().transpose(0, -1)
