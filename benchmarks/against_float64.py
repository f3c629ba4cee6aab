"""A call of ``scan`` with all its gradients, held against float64 on the same rounded inputs.

    error of a tensor x = |x - y|_F / |y|_F, y in float64

Every memory block that torch hands out during a call is filled with NaN first, and every input lies between two runs of
NaN: what a kernel forgets to write, or reads out of bounds and uses, is then no number.

Shapes: B batch, T time, HV value heads, K key_dim, V value_dim, N documents.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.utils.deterministic as deterministic
from torch import Tensor

from statemix.harness.recurrences import NamedRecurrence, Operands
from statemix.transitions import scan

from .ops import OPS, Sizes, random_operands

GUARD = 256  # elements of NaN before and after each input; keeps it aligned to 16 bytes

# The largest error of (results, gradients) that counts as right. Products of 16-bit inputs add up in float32; rounding
# an operand to bfloat16 costs 2^-9, and a prototype of these kernels stayed below 4e-3.
LIMITS: dict[torch.dtype, tuple[float, float]] = {
    torch.float64: (1e-10, 1e-10),
    torch.float32: (1e-5, 1e-4),
    torch.bfloat16: (8e-3, 2e-2),
    torch.float16: (8e-3, 2e-2),
}
# Gradients of 16-bit inputs where every key is the same. Corrected values then alternate in sign and cancel in all that
# they are summed into, and each is kept in 16 bits: what is left of q's, beta's and most of all a gate's gradient is
# small beside their roundings. Outputs and states are held to the limits above, float32 to all of them.
LIMIT_UNDER_EQUAL_KEYS = 0.3
# Operands of products are rounded to the input's dtype, where float16 keeps nothing below this. Under decays of e^-20
# all that is left of a gradient can be less. An element is a sum of up to 512 such operands with factors of order one.
LOST: dict[torch.dtype, float] = {torch.float16: 2.0**-24 * 512**0.5}
DEFINITION_UP_TO = 1 << 24  # numbers in the states of all tokens, of which autograd keeps several copies
STEPS_UP_TO = 512  # delta updates by the definition, which on a GPU takes a millisecond for each, gradients included
RESULTS = ("output", "final_state")

Gates = Literal["ordinary", "zero", "mixed", "strong", "resets"]
Rates = Literal["ordinary", "to two", "one", "two"]


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        offsets: of packed documents, then batch is 1; tokens after the last offset must come out as zeros.
        has_state: an initial state is given, and the final one takes part in the loss; both or neither.
        gates: log decays: as drawn; 0; 0 and -8 in turns; -20; -80 at every eighth token.
        rates: beta: below 1, as drawn; up to 2 and 2 itself where no state can grow under them, else 1 in place of 2.
        has_equal_keys: all are one key, whose products no 16-bit dtype rounds.
        has_narrow_gates: log decays in the dtype of q in place of float32.
        is_strided: inputs and upstream gradient are views with strides of their own.
        form: "recurrent" has no backward pass in the kernels and is run forward only.
        options: passed on to ``scan``.
    """

    name: str
    batch: int
    seq_len: int
    num_heads: int = 2
    num_value_heads: int = 4
    offsets: tuple[int, ...] = ()
    has_state: bool = True
    gates: Gates = "ordinary"
    rates: Rates = "ordinary"
    has_equal_keys: bool = False
    has_narrow_gates: bool = False
    is_strided: bool = False
    scale: float | None = None
    form: Literal["chunk", "recurrent"] = "chunk"
    options: tuple[tuple[str, Any], ...] = ()

    def sizes(self, key_dim: int, value_dim: int) -> Sizes:
        return Sizes(self.batch, self.seq_len, self.num_heads, self.num_value_heads, key_dim, value_dim)


@dataclass(frozen=True)
class Problem:
    """Inputs of a case and the upstream gradients of its results."""

    operands: Operands
    initial_state: Tensor | None
    cu_seqlens: Tensor | None
    grad_output: Tensor
    grad_final: Tensor


@dataclass(frozen=True)
class Finding:
    """What came of a case: errors and numbers of elements by tensor, and in words what is wrong, if anything."""

    errors: dict[str, float]
    num_elements: dict[str, int]
    faults: tuple[str, ...]


def check_case(
    op: NamedRecurrence,
    case: Case,
    *,
    key_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    backend: str,
) -> Finding:
    """Run a case twice and compare: with float64, and the two runs bit by bit."""
    problem = make_problem(op, case, key_dim=key_dim, value_dim=value_dim, dtype=dtype, device=device)
    before = _copies(problem)
    exact = reference(op, case, problem)
    first, second = (run_poisoned(op, case, problem, backend=backend) for _ in range(2))
    lost, sizes = LOST.get(dtype, 0.0), {"d fixed_decay": _size_of_shares(op, case, problem)}
    errors = {
        name: relative_error(x, exact[name], lost=lost, least_size=sizes.get(name, 0.0)) for name, x in first.items()
    }
    faults = [_over_limit(name, error, case, dtype) for name, error in errors.items()]
    faults += [f"{name}: two runs differ" for name, x in first.items() if not same_bits(x, second[name])]
    faults += _tokens_after_the_last(first, case)
    faults += [f"{name}: changed by the call" for name, x in _copies(problem).items() if not same_bits(x, before[name])]
    num_elements = {name: x.numel() for name, x in first.items()}
    return Finding(errors, num_elements, tuple(fault for fault in faults if fault))


def make_problem(
    op: NamedRecurrence, case: Case, *, key_dim: int, value_dim: int, dtype: torch.dtype, device: torch.device
) -> Problem:
    """Inputs in guarded memory."""
    sizes = case.sizes(key_dim, value_dim)
    operands = set_gates(random_operands(op, sizes, dtype=dtype, device=device), case.gates)
    operands = set_rates(operands, case.rates, max_beta=op.max_beta)
    operands = set_equal_keys(operands, blocks=op.blocks) if case.has_equal_keys else operands
    generator = torch.Generator(device).manual_seed(1)
    num_states = len(case.offsets) - 1 if case.offsets else case.batch
    state_dtype = torch.promote_types(dtype, torch.float32)

    def normal(*shape: int, like: torch.dtype) -> Tensor:
        return guarded(torch.randn(shape, generator=generator, dtype=like, device=device))

    state_shape = (num_states, case.num_value_heads, value_dim, key_dim)
    output_shape = (case.batch, case.seq_len, case.num_value_heads, value_dim)
    offsets = torch.tensor(case.offsets, dtype=torch.int32, device=device) if case.offsets else None
    grad_output = normal(*output_shape, like=dtype)
    if case.has_narrow_gates:
        operands = operands.map(lambda x: x.to(dtype))
    operands = operands.map(guarded)
    if case.is_strided:
        operands, grad_output = operands.map(_strided), _strided(grad_output)
    initial = normal(*state_shape, like=state_dtype) if case.has_state else None
    return Problem(operands, initial, offsets, grad_output, normal(*state_shape, like=state_dtype))


def set_gates(operands: Operands, gates: Gates) -> Operands:
    """Other log decays, of whatever shape: along T for those of tokens, along HV for the fixed one."""

    def change(x: Tensor) -> Tensor:
        index = torch.arange(x.shape[-1], device=x.device)
        if gates == "zero":
            return torch.zeros_like(x)
        if gates == "mixed":
            return torch.where(index % 2 == 0, 0.0, -8.0).to(x).expand(x.shape).contiguous()
        if gates == "strong":
            return torch.full_like(x, -20.0)
        if gates == "resets" and x.ndim > 1:
            token = torch.arange(x.shape[1], device=x.device).view(-1, *[1] * (x.ndim - 2))
            return torch.where(token % 8 == 7, torch.full_like(x, -80.0), x)
        return x

    return replace(
        operands,
        fixed_decay=change(operands.fixed_decay),
        scalar_decay=change(operands.scalar_decay),
        channel_decay=change(operands.channel_decay),
    )


def set_rates(operands: Operands, rates: Rates, *, max_beta: float) -> Operands:
    """Other betas; those that belong to channels and to feedback are 1 where beta is a constant."""
    x = operands
    if rates == "to two":
        return replace(x, beta=x.beta * max_beta)
    if rates in ("one", "two"):
        beta = torch.full_like(x.beta, min(1.0 if rates == "one" else 2.0, max_beta))
        return replace(x, beta=beta, channel_rate=torch.ones_like(x.channel_rate), feedback=torch.ones_like(x.feedback))
    return x


def set_equal_keys(operands: Operands, *, blocks: int) -> Operands:
    """1/8 in 64 channels, or 1/4 in 16, 1/2 in 4: as many as there are in each block. The rest of a key is 0."""
    block_dim = operands.k.shape[-1] // blocks
    num_channels = next(n for n in (64, 16, 4, 1) if n <= block_dim)
    key = torch.zeros(block_dim, dtype=operands.k.dtype, device=operands.k.device)
    key[:num_channels] = num_channels**-0.5
    keys = key.repeat(blocks).expand(operands.k.shape).contiguous()
    return replace(operands, k=keys, direction=keys.clone())


def guarded(x: Tensor) -> Tensor:
    """A copy of x with runs of NaN before and after it in memory."""
    memory = torch.full((x.numel() + 2 * GUARD,), torch.nan, dtype=x.dtype, device=x.device)
    inside = memory[GUARD : GUARD + x.numel()].view(x.shape)
    return inside.copy_(x)


def _strided(x: Tensor) -> Tensor:
    """The same values as every other row of a wider tensor, with the first two axes exchanged in memory."""
    if x.ndim < 2:
        return x
    shape = (x.shape[1], x.shape[0], *x.shape[2:-1], 2 * x.shape[-1])
    wide = torch.full(shape, torch.nan, dtype=x.dtype, device=x.device)
    return wide.transpose(0, 1)[..., : x.shape[-1]].copy_(x)


def reference(op: NamedRecurrence, case: Case, problem: Problem) -> dict[str, Tensor]:
    """Results and gradients in float64: by the definition where it is short and its states fit, else in chunks."""
    in_float64 = Problem(
        problem.operands.map(torch.Tensor.double),
        None if problem.initial_state is None else problem.initial_state.double(),
        problem.cu_seqlens,
        problem.grad_output.double(),
        problem.grad_final.double(),
    )
    num_steps = case.seq_len * op.count
    has_room = num_steps * problem.grad_final.numel() <= DEFINITION_UP_TO
    is_short = op.kernels == "additive" or num_steps <= STEPS_UP_TO
    form: Literal["chunk", "recurrent"] = "recurrent" if has_room and is_short else "chunk"
    return run(op, replace(case, form=form, options=()), in_float64, backend="torch", is_forward_only=False)


def _size_of_shares(op: NamedRecurrence, case: Case, problem: Problem) -> float:
    """Norm of what every token adds to the gradient of a constant decay, in float64.

    The shares have both signs. In the sum of one head they can cancel by chance, and their roundings do not.
    """
    if "fixed_decay" not in op.uses or case.form == "recurrent":
        return 0.0
    x, like = problem.operands, problem.operands.scalar_decay
    by_token = replace(x, scalar_decay=x.fixed_decay.to(like.dtype).expand(like.shape).contiguous())
    shares = reference(OPS["mamba2"], case, replace(problem, operands=by_token))["d scalar_decay"]
    return float(torch.linalg.vector_norm(shares))


def run(op: NamedRecurrence, case: Case, problem: Problem, *, backend: Any, is_forward_only: bool) -> dict[str, Tensor]:
    """Output, final state, and the gradient of each input as ``d NAME``."""
    wants_grad = not is_forward_only
    operands = problem.operands.map(lambda x: x.detach().requires_grad_(wants_grad))
    inputs = op.inputs(operands)
    initial = problem.initial_state
    if initial is not None:
        initial = inputs["initial_state"] = initial.detach().requires_grad_(wants_grad)
    transition, write = op.build(operands)
    with torch.set_grad_enabled(wants_grad):
        result = scan(
            operands.q,
            operands.k,
            operands.v,
            transition,
            write=write,
            scale=case.scale,
            initial_state=initial,
            cu_seqlens=problem.cu_seqlens,
            form=case.form,
            backend=backend,
            **dict(case.options),
        )
    results = {"output": result.output, "final_state": result.final_state}
    if is_forward_only:
        return results
    outputs, upstream = [result.output], [problem.grad_output]
    if case.has_state:
        outputs, upstream = [*outputs, result.final_state], [*upstream, problem.grad_final]
    grads = torch.autograd.grad(outputs, list(inputs.values()), upstream)
    return {name: x.detach() for name, x in results.items()} | {
        f"d {name}": grad for name, grad in zip(inputs, grads, strict=True)
    }


def run_poisoned(op: NamedRecurrence, case: Case, problem: Problem, *, backend: str) -> dict[str, Tensor]:
    """``run`` with every fresh block of memory full of NaN."""
    with nan_in_fresh_memory():
        tensors = run(op, case, problem, backend=backend, is_forward_only=case.form == "recurrent")
        if problem.operands.q.is_cuda:
            torch.cuda.synchronize()
    return tensors


@contextmanager
def nan_in_fresh_memory() -> Iterator[None]:
    """Inside, ``torch.empty`` and its like return NaN. A switch of the whole process, so autograd's threads see it."""
    was_on = torch.are_deterministic_algorithms_enabled()
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # operators of torch that are not deterministic say so
        torch.use_deterministic_algorithms(True, warn_only=True)
        deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
        try:
            yield
        finally:
            deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
            torch.use_deterministic_algorithms(was_on, warn_only=only_warned)


def relative_error(x: Tensor, y: Tensor, *, lost: float = 0.0, least_size: float = 0.0) -> float:
    """|x - y| / |y|; where y is 0, 0 for an exact zero and infinity for anything else; infinity for a NaN.

    Args:
        lost: what an element may be off without counting.
        least_size: divides in place of a smaller |y|.
    """
    size = max(float(torch.linalg.vector_norm(y)), least_size)
    distance = float(torch.linalg.vector_norm(x.double() - y))
    if not distance < float("inf"):
        return float("inf")
    distance = max(distance - lost * y.numel() ** 0.5, 0.0)
    return distance / size if size > 0 else 0.0 if distance == 0 else float("inf")


def same_bits(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and torch.equal(_bytes(x), _bytes(y))


def _bytes(x: Tensor) -> Tensor:
    """In one axis: a last axis of size 1 may have any stride, which a view as bytes refuses."""
    return x.reshape(-1).contiguous().view(torch.uint8)


def _over_limit(name: str, error: float, case: Case, dtype: torch.dtype) -> str:
    limit = LIMITS[dtype][0 if name in RESULTS else 1]
    if case.has_equal_keys and name not in RESULTS and dtype.itemsize == 2:
        limit = LIMIT_UNDER_EQUAL_KEYS
    return "" if error <= limit else f"{name}: error {error:.1e} over {limit:.0e}"


def _tokens_after_the_last(tensors: dict[str, Tensor], case: Case) -> Sequence[str]:
    """Tokens of no document: zeros in the output and in every gradient along T."""
    if not case.offsets or case.offsets[-1] == case.seq_len:
        return []
    rest = slice(case.offsets[-1], None)
    along_time = {
        name: x
        for name, x in tensors.items()
        if x.ndim > 2 and x.shape[:2] == (1, case.seq_len) and "state" not in name
    }
    return [f"{name}: not 0 after the last document" for name, x in along_time.items() if bool((x[:, rest] != 0).any())]


def _copies(problem: Problem) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in problem.operands.named()}
