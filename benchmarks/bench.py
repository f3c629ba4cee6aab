"""How fast the recurrences run here: ``statemix bench``, for named recurrences or for the layers of a recipe."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from statemix.harness.recurrences import NamedRecurrence
from statemix.mixers import StateMixer
from statemix.recipes import Recipe
from statemix.transitions import Transition, explain, scan

from .ops import Sizes, find_ops, random_operands
from .timing import Timing, copy_bandwidth, least_bytes, time_both_ways

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# On a CPU the torch forms take a second for what a GPU does in a millisecond.
GPU_SIZES = Sizes(8, 2048, 16, 16, 128, 128)
CPU_SIZES = Sizes(1, 512, 4, 4, 64, 64)


@dataclass(frozen=True)
class Subject:
    """A recurrence with its inputs.

    Attributes:
        make: transition and write; called anew in every run, as in training.
        leaves: the tensors that get gradients.
    """

    label: str
    sizes: Sizes
    q: Tensor
    k: Tensor
    v: Tensor
    make: Callable[[], tuple[Transition, Tensor | None]]
    leaves: tuple[Tensor, ...]

    def run(self) -> Tensor:
        transition, write = self.make()
        return scan(self.q, self.k, self.v, transition, write=write).output


@dataclass(frozen=True)
class Line:
    """One line of the report; ``timing`` is None where memory ran out, floors are 0 where no bandwidth was measured."""

    subject: str
    sizes: str
    form: str
    timing: Timing | None
    floor_ms: float
    floor_forward_backward_ms: float


def choose_device(name: str | None) -> torch.device:
    """The GPU if there is one, or the device asked for.

    Raises:
        ValueError: a GPU is asked for and there is none.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: expected one that this machine has, got cuda without a usable GPU; use cpu")
    return torch.device(name)


def with_sizes(default: Sizes, options: Any) -> Sizes:
    """``default`` with the sizes that ``options`` has: value heads follow the heads, value_dim follows key_dim."""
    num_heads, key_dim = options.num_heads or default.num_heads, options.key_dim or default.key_dim
    num_value_heads = options.num_value_heads or num_heads
    if num_value_heads % num_heads:
        raise ValueError(f"num_value_heads: expected a multiple of num_heads {num_heads}, got {num_value_heads}")
    tokens = (options.batch or default.batch, options.seq_len or default.seq_len)
    return Sizes(*tokens, num_heads, num_value_heads, key_dim, options.value_dim or key_dim)


def bench(subjects: Iterator[Subject], *, device: torch.device, rep_ms: int = 200) -> Iterator[Line]:
    """Time each subject; the floors are the bytes it must move over the bandwidth of a copy measured first."""
    bandwidth = copy_bandwidth(device) if device.type == "cuda" else 0.0
    for subject in subjects:
        transition, write = subject.make()
        chosen = explain(subject.q, subject.k, subject.v, transition, write=write)
        bytes_moved = least_bytes(subject.leaves, subject.v if subject.v.ndim == 4 else subject.v[:, :, 0])
        floors = [1e3 * moved / bandwidth if bandwidth else 0.0 for moved in bytes_moved]
        timing = None
        with suppress(torch.OutOfMemoryError):
            timing = time_both_ways(subject.run, subject.leaves, rep_ms=rep_ms)
        yield Line(subject.label, str(subject.sizes), f"{chosen.form}, {chosen.backend}", timing, *floors)


def header(device: torch.device, dtype: torch.dtype) -> str:
    """What the figures are, and the titles of the columns."""
    if device.type == "cuda":
        where = torch.cuda.get_device_name(device)
    else:
        where = f"no GPU used: the torch forms on the CPU, {torch.get_num_threads()} threads"
    about = f"{where}; torch {torch.__version__}; {str(dtype).removeprefix('torch.')}; medians in ms"
    titles = f"{'recurrence':<26}{'sizes':<26}{'runs':<16}{'forward':>10}{'floor':>8}{'both':>10}{'floor':>8}{'MB':>8}"
    return f"{about}\n{titles}"


def printed(line: Line) -> str:
    """A line of the table; 'both' is forward and backward, MB what they allocate at the peak."""
    timing, start = line.timing, f"{line.subject:<26}{line.sizes:<26}{line.form:<16}"
    if timing is None:
        return f"{start}{'out of memory':>42}"
    floors = [f"{ms:.3f}" if ms else "-" for ms in (line.floor_ms, line.floor_forward_backward_ms)]
    peak = f"{timing.peak_bytes / 1e6:.0f}" if timing.peak_bytes else "-"
    return f"{start}{timing.forward_ms:>10.3f}{floors[0]:>8}{timing.forward_backward_ms:>10.3f}{floors[1]:>8}{peak:>8}"


def named_subjects(
    names: Sequence[str], sizes: Sizes, *, dtype: torch.dtype, device: torch.device
) -> Iterator[Subject]:
    """Rows of ``OPS`` on random operands of these sizes."""

    def subject(op: NamedRecurrence) -> Subject:
        x = random_operands(op, sizes, dtype=dtype, device=device).map(lambda x: x.requires_grad_(x.ndim > 1))
        leaves = tuple(x for x in op.inputs(x).values() if x.requires_grad)
        return Subject(op.label, sizes, x.q, x.k, x.v, lambda: op.build(x), leaves)

    return map(subject, find_ops(tuple(names)))


def recipe_subjects(
    recipe: Recipe, *, batch: int | None, seq_len: int | None, dtype: torch.dtype, device: torch.device
) -> Iterator[Subject]:
    """The recurrence of each kind of state layer in a recipe, at its batch and length of training unless options.

    Raises:
        ValueError: the recipe has no state layer.
    """
    layers = dict(zip(recipe.layer_names, recipe.layer_configs, strict=True))
    configs = {name: layer.mixer for name, layer in layers.items() if isinstance(layer.mixer, StateMixer.Config)}
    if not configs:
        raise ValueError(f"recipe: expected a layer with a mixer of type state to time, got none in {recipe.name}")
    tokens = (batch or recipe.training.batch_size, seq_len or recipe.training.seq_len)
    hidden_size = recipe.model.hidden_size
    return (
        _mixer_subject(name, config, hidden_size, tokens, dtype=dtype, device=device)
        for name, config in configs.items()
    )


def _mixer_subject(
    name: str,
    config: StateMixer.Config,
    hidden_size: int,
    tokens: tuple[int, int],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Subject:
    """The scan of a mixer as its own module makes it from random hidden states, without projections and norms."""
    generator = torch.Generator().manual_seed(0)
    mixer = StateMixer(config, hidden_size=hidden_size).to(device)
    value_dim = mixer.value_dim + config.is_normalized  # which sums the weights in one more channel
    sizes = Sizes(*tokens, mixer.num_heads, mixer.num_value_heads, mixer.key_dim, value_dim)
    count = (mixer.num_writes,) if mixer.num_writes > 1 else ()

    def normal(*shape: int) -> Tensor:
        return torch.randn(*tokens, *shape, generator=generator).to(device)

    def unit(*shape: int) -> Tensor:
        blocks = normal(*shape, mixer.key_dim).unflatten(-1, (mixer.blocks, -1))
        return normalize(blocks, dim=-1).flatten(-2).to(dtype)

    hidden = normal(hidden_size)
    q, k = unit(sizes.num_heads).requires_grad_(), unit(*count, sizes.num_heads).requires_grad_()
    v = normal(*count, sizes.num_value_heads, sizes.value_dim).to(dtype).requires_grad_()
    with torch.no_grad():
        transition, write = mixer.transition(hidden, k)
    # Leaves in place of what the module computed; what was one tensor before is one after.
    leaves: dict[int, Tensor] = {id(k): k}

    def leaf(x: Tensor) -> Tensor:
        return leaves.setdefault(id(x), x.detach().requires_grad_())

    own = transition.map_tensors(lambda _, x: leaf(x))
    own_write = None if write is None else leaf(write)
    return Subject(name, sizes, q, k, v, lambda: (own, own_write), (q, v, *leaves.values()))
