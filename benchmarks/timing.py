"""Time and memory of one call, and the bytes that it has to move at least.

On a GPU: the median over CUDA events, the second-level cache emptied before every run (``triton.testing.do_bench``).
On a CPU: the median of the wall clock.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Run = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Milliseconds of a forward pass alone and of forward and backward; bytes at the peak above those of the inputs."""

    forward_ms: float
    forward_backward_ms: float
    peak_bytes: int


def time_both_ways(call: Callable[[], Tensor], leaves: Sequence[Tensor], *, rep_ms: int = 200) -> Timing:
    """Time ``call`` without and with its backward pass.

    Args:
        call: gives the output.
        leaves: every tensor whose gradient counts; all require one.
        rep_ms: milliseconds spent measuring each, after a quarter of that to warm up.
    """
    forward, forward_backward = _both_ways(call, leaves)
    forward_backward()
    peak = peak_bytes(forward_backward, leaves)
    forward_ms, both_ms = (
        median_ms(run, device=leaves[0].device, rep_ms=rep_ms) for run in (forward, forward_backward)
    )
    return Timing(forward_ms, both_ms, peak)


def graph_ms(call: Callable[[], Tensor], leaves: Sequence[Tensor], *, rep_ms: int = 200) -> tuple[float, float]:
    """Both times of launches recorded in a CUDA graph: the kernels alone, without what Python takes to start them."""
    times = []
    for run in _both_ways(call, leaves):
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):  # a warm-up in a stream of its own, as torch asks for
            run()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        times.append(median_ms(graph.replay, device=leaves[0].device, rep_ms=rep_ms))
    return times[0], times[1]


def _both_ways(call: Callable[[], Tensor], leaves: Sequence[Tensor]) -> tuple[Run, Run]:
    """A forward pass without gradients, and forward and backward for one upstream gradient."""
    with torch.no_grad():
        upstream = torch.randn_like(call())

    def forward() -> None:
        with torch.no_grad():
            call()

    def forward_backward() -> None:
        for leaf in leaves:
            leaf.grad = None
        call().backward(upstream)

    return forward, forward_backward


def median_ms(run: Run, *, device: torch.device, rep_ms: int = 200) -> float:
    """Median milliseconds of ``run``, which has run before."""
    if device.type == "cuda":
        from triton.testing import do_bench

        return float(do_bench(run, warmup=rep_ms // 4, rep=rep_ms, return_mode="median"))
    times: list[float] = []
    started = time.perf_counter()
    while len(times) < 3 or (time.perf_counter() - started) * 1e3 < rep_ms:
        begin = time.perf_counter()
        run()
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times)


def peak_bytes(run: Run, leaves: Iterable[Tensor]) -> int:
    """Bytes allocated at the peak of ``run`` above those before it, gradients included; 0 on a CPU."""
    leaves = list(leaves)
    if leaves[0].device.type != "cuda":
        return 0
    for leaf in leaves:
        leaf.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def copy_bandwidth(device: torch.device, *, num_bytes: int = 2 << 30) -> float:
    """Bytes a second, read and written, of a large copy on the device."""
    source = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * num_bytes / (median_ms(lambda: target.copy_(source), device=device) * 1e-3)


def least_bytes(inputs: Iterable[Tensor], output: Tensor) -> tuple[int, int]:
    """Bytes that any forward pass, and any forward and backward pass, has to move.

    Forward reads every input and writes the output. Backward reads every input and the upstream gradient, and writes
    a gradient for every input that requires one.
    """

    def size(tensors: Iterable[Tensor]) -> int:
        return sum(x.numel() * x.element_size() for x in tensors)

    inputs = list(inputs)
    forward = size([*inputs, output])
    return forward, 2 * forward + size(x for x in inputs if x.requires_grad)
