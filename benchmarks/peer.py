"""Times flash-linear-attention on a CUDA GPU, on the inputs that ours are timed on; a JSON line for each op and shape.

    python benchmarks/peer.py OP ... [--shapes N]       compile and tune side by side, then time each op alone
    python benchmarks/peer.py OP ... --earlier          the figures of an earlier run, for where it cannot run

Each op tunes for minutes, so a run of seven takes five to six on sixteen cores. The peer refuses gated backward passes
on Hopper with Triton 3.4 to 3.7.0, where its own gradients are wrong; the refusal is lifted here FOR TIMING ONLY, and
every line says so.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from statemix.benchmarks.measured_on import gpu_name, versions
from statemix.benchmarks.ops import OPS, SHAPES, Sizes, random_operands
from statemix.benchmarks.timing import Timing, time_both_ways
from statemix.harness.recurrences import Operands

NAME = "flash-linear-attention"
NOTE = "its refusal of gated backward passes on Hopper was lifted for timing only"
WARM_S, TIME_S = 330, 90  # for all ops side by side, and for each shape of one op

# Module, function, and its arguments; the output is the first of what it returns.
Arguments = Callable[[Operands], tuple[tuple[Any, ...], dict[str, object]]]
PEERS: dict[str, tuple[str, str, Arguments]] = {
    "linear_attention": ("linear_attn", "chunk_linear_attn", lambda x: ((x.q, x.k, x.v), {"normalize": False})),
    "retnet": ("retention", "chunk_retention", lambda x: ((x.q, x.k, x.v), {})),
    "mamba2": ("simple_gla", "chunk_simple_gla", lambda x: ((x.q, x.k, x.v), {"g": x.scalar_decay})),
    "gla": ("gla", "chunk_gla", lambda x: ((x.q, x.k, x.v, x.channel_decay), {})),
    "deltanet": ("delta_rule", "chunk_delta_rule", lambda x: ((x.q, x.k, x.v, x.beta), {})),
    "gated_deltanet": (
        "gated_delta_rule",
        "chunk_gated_delta_rule",
        lambda x: ((x.q, x.k, x.v, x.scalar_decay, x.beta), {}),
    ),
    "kda": ("kda", "chunk_kda", lambda x: ((x.q, x.k, x.v, x.channel_decay, x.beta), {})),
    "deltaproduct": ("gated_delta_product", "chunk_gated_delta_product", lambda x: (_product(x, None), {})),
    "gated_deltaproduct": (
        "gated_delta_product",
        "chunk_gated_delta_product",
        lambda x: (_product(x, x.scalar_decay), {}),
    ),
}


def _product(x: Operands, log_decay: Tensor | None) -> tuple[Any, ...]:
    """Steps lie one after another along T there, [B, T n, ...]."""
    k, v, beta = (tensor.flatten(1, 2) for tensor in (x.k, x.v, x.beta))
    return x.q, k, v, log_decay, beta, x.k.shape[2]


# flash-linear-attention 0.6.0 on one H200, bfloat16, known by November 2026: (forward, forward and backward) in ms for
# the first two shapes. DeltaProduct was not timed then.
EARLIER: dict[str, tuple[tuple[float, float], ...]] = {
    "linear_attention": ((0.194, 1.41), (0.745, 2.71)),
    "retnet": ((0.562, 2.00), (0.680, 2.85)),
    "mamba2": ((0.270, 1.98), (0.607, 3.19)),
    "gla": ((0.706, 2.98), (2.008, 7.90)),
    "deltanet": ((0.799, 2.85), (1.507, 4.57)),
    "gated_deltanet": ((0.701, 3.18), (1.447, 5.46)),
    "kda": ((0.923, 4.85), (2.563, 12.14)),
}


def record(op: str, sizes: Sizes, timing: Timing, origin: dict[str, Any]) -> str:
    """A line in the words of docs/results."""
    entry = {
        "op": op,
        **asdict(sizes),
        "head_dim": sizes.key_dim,
        "count": OPS[op].count,
        "blocks": 1,
        "dtype": "bfloat16",
        "backend": NAME,
        "recompute": False,
        "forward_ms": round(timing.forward_ms, 4),
        "forward_backward_ms": round(timing.forward_backward_ms, 4),
        "peak_mb": round(timing.peak_bytes / 1e6, 1) or None,
        "first_call_s": None,
        **origin,
    }
    return json.dumps(entry)


def print_earlier(ops: Sequence[str]) -> None:
    note = f"measured earlier, not in this run; {NOTE}"
    origin = {"gpu": "NVIDIA H200", "versions": {NAME: "0.6.0"}, "date": "2026-11", "note": note}
    for op in ops:
        for sizes, (forward, both) in zip(SHAPES, EARLIER.get(op, ()), strict=False):
            print(record(op, sizes, Timing(forward, both, 0), origin))


def call_on(op: str, operands: Operands) -> Callable[[], Tensor]:
    """One call of the peer's function."""
    module, function, arguments_of = PEERS[op]
    run = getattr(import_module(f"fla.ops.{module}"), function)
    positional, named = arguments_of(operands)
    return lambda: run(*positional, **named)[0]


def run_one(op: str, num_shapes: int, *, is_warm_up: bool) -> None:
    """Time one op in this process; a warm-up fills the cache of compiled kernels and prints nothing."""
    chunk_o = import_module("fla.ops.common.chunk_o")
    chunk_o.IS_NVIDIA_HOPPER = False  # type: ignore[attr-defined]
    origin = {"gpu": gpu_name("cuda"), "versions": versions(NAME), "date": time.strftime("%Y-%m-%d"), "note": NOTE}
    for sizes in SHAPES[: 1 if is_warm_up else num_shapes]:
        operands = random_operands(OPS[op], sizes, dtype=torch.bfloat16, device=torch.device("cuda"))
        operands = operands.map(lambda x: x.requires_grad_(x.ndim > 1))
        call = call_on(op, operands)
        if is_warm_up:
            call().sum().backward()
            torch.cuda.synchronize()
            continue
        leaves = [x for x in OPS[op].inputs(operands).values() if x.requires_grad]
        print(record(op, sizes, time_both_ways(call, leaves), origin), flush=True)


def run_all(ops: Sequence[str], num_shapes: int) -> None:
    """Warm all ops up side by side, then time one after the other, each in a process that may fail."""
    warming = [subprocess.Popen(_command(op, "--warm"), stderr=subprocess.DEVNULL) for op in ops]
    deadline = time.monotonic() + WARM_S
    for process in warming:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for op in ops:
        try:
            done = subprocess.run(
                _command(op, "--one", "--shapes", str(num_shapes)),
                stderr=subprocess.PIPE,
                text=True,
                timeout=TIME_S * num_shapes,
            )
            problem = done.stderr.strip()[-300:] if done.returncode else ""
        except subprocess.TimeoutExpired:
            problem = "timed out"
        if problem:
            print(f"{NAME}: {op}: {problem}", file=sys.stderr, flush=True)


def _command(op: str, *options: str) -> list[str]:
    return [sys.executable, __file__, op, *options]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = f"{', '.join(PEERS)}; others are left out"
    parser.add_argument("ops", nargs="+", choices=list(OPS), metavar="OP", help=known)
    parser.add_argument("--shapes", type=int, default=2, metavar="N", help="how many of the shapes (default: 2)")
    parser.add_argument("--earlier", action="store_true", help="print figures of an earlier run and time nothing")
    parser.add_argument("--warm", action="store_true", help="compile and tune one op for the first shape")
    parser.add_argument("--one", action="store_true", help="time one op in this process")
    arguments = parser.parse_args()
    arguments.ops = [op for op in arguments.ops if op in PEERS]
    if arguments.earlier:
        print_earlier(arguments.ops)
    elif arguments.warm or arguments.one:
        run_one(arguments.ops[0], arguments.shapes, is_warm_up=arguments.warm)
    else:
        run_all(arguments.ops, arguments.shapes)


if __name__ == "__main__":
    main()
