"""Times, and the bytes of the floor."""

import torch

from statemix.benchmarks.ops import OPS, SHAPES, random_operands
from statemix.benchmarks.timing import least_bytes, median_ms, time_both_ways

CPU = torch.device("cpu")


def test_the_floor_counts_each_input_and_output_once() -> None:
    sizes = SHAPES[3]  # B8 T1024 H8 D64
    x = random_operands(OPS["gla"], sizes, dtype=torch.bfloat16, device=CPU).map(lambda x: x.requires_grad_(x.ndim > 1))
    head = 8 * 1024 * 8 * 64 * 2  # bytes of q, k, v or o
    forward, both = least_bytes(OPS["linear_attention"].inputs(x).values(), x.v)
    assert forward == 4 * head  # q, k, v and o
    assert both == (4 + 4 + 3) * head  # again with the upstream gradient in place of o, then dq, dk, dv
    gated_forward, gated_both = least_bytes(OPS["gla"].inputs(x).values(), x.v)
    assert gated_forward - forward == 2 * head  # a float32 for each channel
    assert gated_both - both == 3 * 2 * head
    assert least_bytes(OPS["retnet"].inputs(x).values(), x.v)[0] - forward == 8 * 4  # constants, without gradients


def test_the_median_is_of_at_least_three_runs() -> None:
    runs: list[int] = []
    assert median_ms(lambda: runs.append(1), device=CPU, rep_ms=0) >= 0
    assert len(runs) == 3


def test_forward_is_timed_without_gradients_and_both_with_all() -> None:
    x = torch.ones(3, requires_grad=True)
    modes: set[bool] = set()

    def call() -> torch.Tensor:
        modes.add(torch.is_grad_enabled())
        return 2 * x

    timing = time_both_ways(call, [x], rep_ms=0)
    assert modes == {True, False}
    assert timing.forward_ms > 0 and timing.forward_backward_ms > 0 and timing.peak_bytes == 0
    assert x.grad is not None
