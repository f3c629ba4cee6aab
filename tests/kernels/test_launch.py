"""A launch finds the kernel that was compiled for its arguments, and no other."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from statemix.kernels import launch as module
from statemix.kernels.launch import recording
from statemix.kernels.launch_config import (
    AdditiveConfig,
    Config,
    Tiles,
    TunedConfig,
    additive_config,
    compile_for,
    delta_config,
    override,
)
from statemix.kernels.operands import ScanOperands


class Kernel:
    """Stands in for a kernel under ``triton.jit``: counts compilations, keeps what is launched."""

    arg_names = ("x_ptr", "y_ptr", "T", "A", "B")

    def __init__(self) -> None:
        self.num_compiled, self.launched = 0, list[tuple[Any, ...]]()
        self.fn = lambda: None

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def compile_and_run(*args: Any, **options: Any) -> Any:
            self.num_compiled += 1
            return self

        def run(*args: Any) -> None:
            self.launched.append((grid, *args))

        return run if len(grid) == 3 else compile_and_run


@pytest.mark.parametrize(
    ("x", "y", "length", "constants"),
    [
        (torch.zeros(9)[1:], None, 5, {"A": 1, "B": 2}),
        (torch.zeros(8, dtype=torch.float16), None, 5, {"A": 1, "B": 2}),
        (torch.zeros(8), torch.zeros(8), 5, {"A": 1, "B": 2}),
        (torch.zeros(8), None, 2**31, {"A": 1, "B": 2}),
        (torch.zeros(8), None, 5.0, {"A": 1, "B": 2}),
        (torch.zeros(8), None, 5, {"A": 2, "B": 1}),
        (torch.zeros(8), None, 5, {"B": 1, "A": 2}),
    ],
    ids=["unaligned", "dtype", "present", "64 bits", "number", "constant", "constants in another order"],
)
def test_other_arguments_are_compiled_for(x: Any, y: Any, length: Any, constants: dict[str, int]) -> None:
    kernel = Kernel()
    for given in ((torch.zeros(8), None, 5, {"A": 1, "B": 2}), (x, y, length, constants)):
        *args, values = given
        module.launch(kernel, (4,), tuple(args), values, num_warps=4, num_stages=1)
    assert kernel.num_compiled == 2 and not kernel.launched


def test_the_same_arguments_are_not_and_constants_come_in_the_order_of_the_parameters() -> None:
    kernel, x = Kernel(), torch.zeros(8)
    for length in (5, 6, 7):
        module.launch(kernel, (4,), (x, None, length), {"B": 2, "A": 1}, num_warps=4, num_stages=1)
    assert kernel.num_compiled == 1
    assert [(grid, *rest) for grid, _, *rest in kernel.launched] == [((4, 1, 1), None, n, 1, 2) for n in (6, 7)]


def test_a_limit_of_registers_reaches_the_compiler_and_is_compiled_for() -> None:
    options = list[dict[str, Any]]()

    class Listening(Kernel):
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            run = super().__getitem__(grid)
            return lambda *args, **given: (options.append(given), run(*args, **given))[1]

    kernel, x = Listening(), torch.zeros(8)
    for limit in (None, 128, None, 128):
        module.launch(kernel, (4,), (x, None, 5), {"A": 1, "B": 2}, num_warps=4, num_stages=1, max_registers=limit)
    assert kernel.num_compiled == 2 and [given.get("maxnreg") for given in options[:2]] == [None, 128]


def scan_of(x: torch.Tensor, gate: Any, offsets: Any, *, erases: bool) -> ScanOperands:
    return ScanOperands(x, None, x, x, None, None, gate, None, offsets, erases)


def test_a_plan_that_was_made_before_does_not_hide_a_tuned_row() -> None:
    pytest.importorskip("triton")
    from statemix.kernels.triton.additive import _plan

    x = torch.zeros(1, 130, 1, 64, dtype=torch.bfloat16)
    operands = scan_of(x, None, None, erases=False)
    row = TunedConfig("sm_90", 64, 64, torch.bfloat16, AdditiveConfig.uniform(32, Tiles(64, 4, 1)))
    with compile_for("sm_90"):
        before = _plan(operands).partition.chunks.count
        with override([row]):
            assert _plan(operands).partition.chunks.count == 5
        assert _plan(operands).partition.chunks.count == before == 3


def forward_then_backward(operands: ScanOperands, first: TunedConfig, then: TunedConfig) -> None:
    """Both passes on the meta device, each under a row of its own."""
    from statemix.kernels.triton import additive, delta

    kernels = delta if operands.erases else additive
    with compile_for("sm_90"), recording():
        with override([first]):
            output, _, saved = kernels.forward(operands, scale=1.0, save=True)
        with override([then]):
            kernels.backward(output, None, operands, saved, scale=1.0, needs_decay_grad=True)


SIZES = (64, 64, torch.bfloat16)
ADDITIVE, DELTA = additive_config("sm_90", *SIZES), delta_config("sm_90", *SIZES)
SAME = {"reverse": Tiles(64, 8, 1)}
# Rows, heads and documents. Documents are cut into 13 segments at most, of 576 rows where 128 programs fill the device
# and of 512 where 256 do.
BATCH, PACKED = (4096, 1, 0), (1728, 4, 10)


@pytest.mark.parametrize("decay", [None, "scalar", "diagonal"])
@pytest.mark.parametrize(
    ("present", "sizes", "first", "then"),
    [
        (DELTA, BATCH, {}, SAME),
        (DELTA, BATCH, {}, {"chunk_size": 32}),
        (DELTA, BATCH, {}, {"fill": 1}),
        (DELTA, PACKED, {"fill": 256}, SAME),
        (DELTA, PACKED, {"fill": 128}, {"fill": 256}),
        (ADDITIVE, BATCH, {}, SAME),
        (ADDITIVE, BATCH, {}, {"chunk_size": 32}),
        (ADDITIVE, BATCH, {}, {"fill": 1}),  # it saves nothing of segments
    ],
)
def test_a_backward_pass_that_would_cut_otherwise_than_its_forward_pass_is_refused(
    decay: str | None, present: Config, sizes: tuple[int, int, int], first: dict[str, Any], then: dict[str, Any]
) -> None:
    rows, heads, documents = sizes
    x = torch.empty(1, rows, heads, 64, dtype=torch.bfloat16, device="meta")
    offsets = torch.empty(documents + 1, dtype=torch.int32, device="meta") if documents else None
    gate = {"scalar": x[..., 0].float(), "diagonal": x.float()}.get(decay or "")
    is_refused = then != SAME and (present is DELTA or "fill" not in then)
    operands = scan_of(x, gate, offsets, erases=present is DELTA)
    rows_of = [TunedConfig("sm_90", *SIZES, replace(present, **change)) for change in (first, then)]
    with pytest.raises(ValueError, match="tiles: .*backward inside the same") if is_refused else nullcontext():
        forward_then_backward(operands, *rows_of)
