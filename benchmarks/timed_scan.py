"""One recurrence at one size, to be timed in a process of its own, and its record in docs/results.

The scripts of ``benchmarks`` are made of these; ``statemix bench`` times what a user names in this process.
"""

import argparse
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch

from statemix.harness.recurrences import NamedRecurrence, Operands
from statemix.transitions import scan

from .bench import DTYPES
from .measured_on import provenance, write_records
from .ops import OPS, Sizes, random_operands
from .timing import copy_bandwidth, graph_ms, least_bytes, median_ms, time_both_ways
from .worker_pool import run_isolated

TIMEOUT_S = 240.0  # for one call, compiled anew

Record = dict[str, Any]


@dataclass(frozen=True)
class TimedScan:
    """One call to time.

    Attributes:
        rep_ms: milliseconds spent on each figure.
        is_both: of the first call, forward and backward; otherwise forward alone.
        has_graphs: time launches recorded in CUDA graphs as well.
        form: "recurrent" has no backward pass in the kernels.
        blocks: in place of those of a block-diagonal recurrence; 0 for its own.
    """

    op: str
    sizes: Sizes
    dtype: str
    device: str
    backend: str
    is_recomputed: bool
    rep_ms: int
    is_both: bool = True
    has_graphs: bool = False
    form: Literal["chunk", "recurrent"] = "chunk"
    blocks: int = 0

    def __str__(self) -> str:
        form = "" if self.form == "chunk" else f", {self.form}"
        return f"{self.recurrence.label}, {self.sizes}{form}"

    @property
    def recurrence(self) -> NamedRecurrence:
        return OPS[self.op].in_blocks(self.blocks) if self.blocks else OPS[self.op]

    def operands(self) -> Operands:
        """Those that the recurrence reads, leaves of autograd; the others are empty, since many calls share a GPU."""
        operands = random_operands(
            self.recurrence, self.sizes, dtype=DTYPES[self.dtype], device=torch.device(self.device)
        )
        read = self.recurrence.inputs(operands)
        operands = replace(operands, **{name: x.new_empty(0) for name, x in operands.named() if name not in read})
        return operands.map(lambda x: x.requires_grad_(x.ndim > 1))  # RetNet's decays are constants

    def call_on(self, operands: Operands) -> Callable[[], torch.Tensor]:
        op, backend = self.recurrence, cast(Literal["torch", "triton"], self.backend)

        def call() -> torch.Tensor:
            transition, write = op.build(operands)
            q, k, v = operands.q, operands.k, operands.v
            form, recompute = self.form, self.is_recomputed
            return scan(q, k, v, transition, write=write, form=form, backend=backend, recompute=recompute).output

        return call


def run_once(task: TimedScan) -> float:
    """Seconds of one forward pass, and of backward unless it is left out, compiling what is not in the cache."""
    operands = task.operands()
    call = task.call_on(operands)
    wait(task.device)
    began = time.perf_counter()
    with torch.set_grad_enabled(task.is_both):
        output = call()
        if task.is_both:
            output.backward(torch.ones_like(output))
    wait(task.device)
    seconds = time.perf_counter() - began
    del operands, call, output
    if task.device == "cuda":
        torch.cuda.empty_cache()  # many of these share a GPU
    return seconds


def first_call(task: TimedScan) -> float:
    """``run_once`` with an empty cache; in a new process."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        return run_once(task)


def measure(task: TimedScan) -> Record:
    """Times, peak memory and the bytes of the floor."""
    operands, op = task.operands(), task.recurrence
    leaves = [x for x in op.inputs(operands).values() if x.requires_grad]
    timing = time_both_ways(task.call_on(operands), leaves, rep_ms=task.rep_ms)
    graphs = {}
    if task.has_graphs:
        times = graph_ms(task.call_on(operands), leaves, rep_ms=task.rep_ms)
        graphs = {"graph_forward_ms": round(times[0], 4), "graph_forward_backward_ms": round(times[1], 4)}
    forward, both = least_bytes(op.inputs(operands).values(), operands.like_output)
    del operands, leaves
    if task.device == "cuda":
        torch.cuda.empty_cache()
    return {
        "forward_ms": round(timing.forward_ms, 4),
        "forward_backward_ms": round(timing.forward_backward_ms, 4),
        "peak_mb": round(timing.peak_bytes / 1e6, 1),
        **graphs,
        "floor_bytes": forward,
        "floor_forward_backward_bytes": both,
    }


def measure_forward(task: TimedScan) -> Record:
    """The time of a forward pass without gradients."""
    call = task.call_on(task.operands())
    with torch.no_grad():
        call()
        forward_ms = median_ms(call, device=torch.device(task.device), rep_ms=task.rep_ms)
    return {"forward_ms": round(forward_ms, 4)}


def measure_bandwidth(device: str) -> float:
    """GB/s of a large copy, read and written; 0 on a CPU."""
    return 0.0 if device == "cpu" else round(copy_bandwidth(torch.device(device)) / 1e9, 1)


def timed_in_turn(
    tasks: Sequence[TimedScan],
    function: Callable[[TimedScan], Record],
    *,
    to_compile: Sequence[TimedScan],
    num_workers: int,
    minutes: float,
    origin: Record,
) -> Iterator[tuple[TimedScan, Record]]:
    """Compile some tasks side by side, then time one after the other; each with its record.

    Args:
        function: ``measure`` or ``measure_forward``, whose result, or "failure", goes into the record.
        minutes: no task begins later; those left then are not yielded.
        origin: goes into every record.
    """
    began = time.monotonic()

    def may_start() -> bool:
        return time.monotonic() - began < 60 * minutes

    failures: dict[TimedScan, str] = {}
    for compiled in run_isolated(
        run_once, to_compile, num_workers=num_workers, timeout_s=TIMEOUT_S, may_start=may_start
    ):
        if compiled.failure:
            failures[compiled.task] = compiled.failure
            yield compiled.task, {**described(compiled.task), "failure": compiled.failure, **origin}
    print(f"compiled {len(to_compile) - len(failures)} calls in {time.monotonic() - began:.0f} s", flush=True)
    right = [task for task in tasks if task not in failures]
    for done in run_isolated(function, right, num_workers=1, timeout_s=TIMEOUT_S, may_start=may_start):
        found = done.result or {"failure": done.failure}
        yield done.task, {**described(done.task), **found, **origin}


def add_timing_options(parser: argparse.ArgumentParser, *, rep_ms: int) -> None:
    """The options of a script whose calls ``written_in_turn`` times."""
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    parser.add_argument("--workers", type=int, default=14, help="processes that compile at a time (default: 14)")
    rep_help = f"milliseconds spent on each figure (default: {rep_ms})"
    parser.add_argument("--rep-ms", type=int, default=rep_ms, help=rep_help)
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no call after this long")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON, a record a line, kept up to date")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: for trying the script itself")
    parser.add_argument("--backend", default="triton", choices=("triton", "torch"))


def written_in_turn(
    tasks: Sequence[TimedScan],
    function: Callable[[TimedScan], Record],
    arguments: argparse.Namespace,
    *,
    to_compile: Sequence[TimedScan],
    line: Callable[[Record], str],
) -> list[Record]:
    """The records of ``timed_in_turn``, each printed and the file written as it comes."""
    records: list[Record] = []
    for _, record in timed_in_turn(
        tasks,
        function,
        to_compile=to_compile,
        num_workers=arguments.workers,
        minutes=arguments.minutes,
        origin=provenance(arguments.device),
    ):
        records.append(record)
        print(line(record), flush=True)
        write_records(arguments.out, records)
    return records


def exit_code(records: Sequence[Record], num_tasks: int) -> int:
    """Print what failed and what was not run: 1 for the first, 2 for the second alone, else 0."""
    failed = sum("failure" in record for record in records)
    print(f"{failed} failed, {num_tasks - len(records)} not run")
    return 1 if failed else 2 if len(records) < num_tasks else 0


def described(task: TimedScan) -> Record:
    """The sizes of a task in the words of docs/results."""
    s, op = task.sizes, task.recurrence
    return {
        "op": task.op,
        **asdict(s),
        "head_dim": s.key_dim if s.key_dim == s.value_dim else None,
        "count": op.count,
        "blocks": op.blocks,
        "dtype": task.dtype,
        "backend": task.backend,
        "form": task.form,
        "recompute": task.is_recomputed,
        "forward_ms": None,
        "forward_backward_ms": None,
        "peak_mb": None,
        "first_call_s": None,
    }


def wait(device: str) -> None:
    """Until the device has done its work."""
    if device == "cuda":
        torch.cuda.synchronize()
