"""Forward, and forward and backward, of each recurrence on a GPU, beside the byte floor and flash-linear-attention.

    python benchmarks/speed.py [--ops OP ...] [--shapes BxTxHxD ...] [--peer] [--no-first-call] [--out FILE]

Times are medians over CUDA events (``triton.testing.do_bench``), bfloat16, the inputs those of ``statemix.ops``. The
floor is the bytes that any implementation must move (inputs read and output written once; in backward inputs and
upstream gradient read, gradients written) over the bandwidth of a large copy measured first. Peak memory is what a
forward and backward pass allocates above its inputs. The first call is that of a process with an empty Triton cache.

With --peer, ``peer.py`` times flash-linear-attention where it is installed, which takes five minutes more. Otherwise
the table has figures measured earlier on an H200, marked so.

Every call runs in a process of its own or in one that is replaced when it fails, so a crash costs one line.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch

from statemix import scan
from statemix.bench import DTYPES
from statemix.measured_on import provenance
from statemix.ops import OPS, SHAPES, Op, Operands, Sizes, random_operands
from statemix.timing import copy_bandwidth, graph_ms, least_bytes, time_both_ways
from statemix.worker_pool import run_isolated

PEER = Path(__file__).with_name("peer.py")
PEER_NAME = "flash-linear-attention"
TIMEOUT_S = 240.0

Record = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """One call to time.

    Attributes:
        rep_ms: milliseconds spent on each figure.
        is_both: of the first call, forward and backward; otherwise forward alone.
        has_graphs: time launches recorded in CUDA graphs as well.
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

    def __str__(self) -> str:
        return f"{OPS[self.op].label}, {self.sizes}"

    def operands(self) -> Operands:
        made = random_operands(self.sizes, dtype=DTYPES[self.dtype], device=torch.device(self.device))
        return made.map(lambda x: x.requires_grad_(x.ndim > 1))  # RetNet's decays are constants

    def call_on(self, operands: Operands) -> Callable[[], torch.Tensor]:
        op, backend = OPS[self.op], cast(Literal["torch", "triton"], self.backend)

        def call() -> torch.Tensor:
            transition, write = op.make(operands)
            q, k, v = operands.q, operands.k, operands.v
            result = scan(q, k, v, transition, write=write, form="chunk", backend=backend, recompute=self.is_recomputed)
            return result.output

        return call


def leaves_of(op: Op, operands: Operands) -> list[torch.Tensor]:
    return [x for x in op.inputs(operands).values() if x.requires_grad]


def run_once(task: Task) -> float:
    """Seconds of one forward pass, and backward if wanted, compiling what is not in the cache."""
    operands = task.operands()
    call = task.call_on(operands)
    _wait(task.device)
    began = time.perf_counter()
    with torch.set_grad_enabled(task.is_both):
        output = call()
        if task.is_both:
            output.backward(torch.ones_like(output))
    _wait(task.device)
    return time.perf_counter() - began


def first_call(task: Task) -> float:
    """``run_once`` with an empty cache; in a new process."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        return run_once(task)


def measure(task: Task) -> Record:
    """Times, peak memory and the bytes of the floor."""
    operands, op = task.operands(), OPS[task.op]
    timing = time_both_ways(task.call_on(operands), leaves_of(op, operands), rep_ms=task.rep_ms)
    graphs = {}
    if task.has_graphs:
        times = graph_ms(task.call_on(operands), leaves_of(op, operands), rep_ms=task.rep_ms)
        graphs = {"graph_forward_ms": round(times[0], 4), "graph_forward_backward_ms": round(times[1], 4)}
    forward, both = least_bytes(op.inputs(operands).values(), operands.v)
    del operands
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


def measure_bandwidth(device: str) -> float:
    """GB/s of a large copy, read and written."""
    if device == "cpu":
        return 0.0
    return round(copy_bandwidth(torch.device(device)) / 1e9, 1)


def time_ours(tasks: Sequence[Task], arguments: argparse.Namespace) -> list[Record]:
    """A record for every task, also for those that failed."""
    failures: dict[Task, str] = {}
    began = time.monotonic()
    for done in run_isolated(run_once, tasks, num_workers=arguments.workers, timeout_s=TIMEOUT_S):
        if done.failure:
            failures[done.task] = done.failure
    print(
        f"compiled {len(tasks) - len(failures)} of {len(tasks)} calls in {time.monotonic() - began:.0f} s", flush=True
    )
    [bandwidth] = [
        done.result for done in run_isolated(measure_bandwidth, [arguments.device], num_workers=1, timeout_s=60)
    ]
    told = {**provenance(arguments.device), "copy_gb_s": bandwidth}
    measured: dict[Task, Record] = {}
    right = [task for task in tasks if task not in failures]
    for done in run_isolated(measure, right, num_workers=1, timeout_s=TIMEOUT_S):
        if done.result is None:
            failures[done.task] = done.failure
        else:
            measured[done.task] = done.result
    firsts = {} if arguments.no_first_call else first_calls(tasks, arguments.first_call_workers)
    records = []
    for task in tasks:
        found = measured.get(task, {"failure": failures.get(task, "not run")})
        records.append({**described(task), **with_floors(found, bandwidth), **firsts.get(task, {}), **told})
    return records


def first_calls(tasks: Sequence[Task], num_workers: int) -> dict[Task, Record]:
    """Seconds of the first call, for the first shape of each recurrence: of forward, and of both in another process."""
    seconds: dict[Task, Record] = {}
    first = {task.op: task for task in reversed(tasks)}.values()
    wanted = [replace(task, is_both=is_both) for task in first for is_both in (False, True)]
    for done in run_isolated(first_call, wanted, num_workers=num_workers, timeout_s=TIMEOUT_S, is_fresh=True):
        key = "first_forward_backward_call_s" if done.task.is_both else "first_call_s"
        value = None if done.result is None else round(done.result, 2)
        seconds.setdefault(replace(done.task, is_both=True), {})[key] = value
    return seconds


def described(task: Task) -> Record:
    """The sizes of a task in the words of docs/results."""
    s = task.sizes
    return {
        "op": task.op,
        **asdict(s),
        "head_dim": s.key_dim if s.key_dim == s.value_dim else None,
        "count": 1,
        "blocks": 1,
        "dtype": task.dtype,
        "backend": task.backend,
        "recompute": task.is_recomputed,
        "forward_ms": None,
        "forward_backward_ms": None,
        "peak_mb": None,
        "first_call_s": None,
    }


def with_floors(found: Record, bandwidth: float | None) -> Record:
    """Bytes of the floor as milliseconds."""
    if "floor_bytes" not in found or not bandwidth:
        return found
    floors = {key: round(found[f"{key}_bytes"] / (bandwidth * 1e6), 4) for key in ("floor", "floor_forward_backward")}
    return {**found, "floor_ms": floors["floor"], "floor_forward_backward_ms": floors["floor_forward_backward"]}


def peer_records(arguments: argparse.Namespace) -> list[Record]:
    """What ``peer.py`` measures, measured before, or knows; nothing on a CPU, where it cannot run."""
    if arguments.peer_from is not None:
        lines = arguments.peer_from.read_text(encoding="utf-8").splitlines()
        return [found for line in lines if line.startswith("{") and (found := json.loads(line))["op"] in arguments.ops]
    if arguments.device == "cpu":
        return []
    options = ["--shapes", str(arguments.peer_shapes)]
    if not arguments.peer or importlib.util.find_spec("fla") is None:
        print(f"{PEER_NAME}: {'not installed' if arguments.peer else 'not asked for'}; figures of an earlier run")
        options = ["--earlier"]
    command = [sys.executable, str(PEER), *arguments.ops, *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def table(records: Sequence[Record]) -> str:
    """A block of lines for each shape; ratios are the peer's time over ours."""
    lines = []
    for sizes in dict.fromkeys(_sizes(record) for record in records):
        here = [record for record in records if _sizes(record) == sizes]
        peers = {record["op"]: record for record in here if record["backend"] == PEER_NAME}
        ours = [record for record in here if record["backend"] != PEER_NAME]
        if not ours:
            continue
        lines += [
            "",
            f"{sizes}, {ours[0]['dtype']}, ms",
            f"{'':<20}{'forward':>9}{'floor':>8}{'peer':>8}{'ratio':>7}{'both':>11}{'floor':>8}{'peer':>8}{'ratio':>7}"
            f"{'MB':>9}{'first call s':>15}",
        ]
        lines += [_line(record, peers.get(record["op"], {})) for record in ours]
    return "\n".join(lines)


def _line(record: Record, peer: Record) -> str:
    label = OPS[record["op"]].label + (", recomputed" if record["recompute"] else "")
    if record["forward_ms"] is None:
        return f"{label:<20}{record.get('failure', 'not run')}"
    text = f"{label:<20}"
    for key, floor, width in (("forward_ms", "floor_ms", 9), ("forward_backward_ms", "floor_forward_backward_ms", 11)):
        mine, theirs, graph = record[key], peer.get(key), record.get(f"graph_{key}")
        text += f"{mine:>{width}.3f}" + ("" if graph is None else f" ({graph:.3f})")
        text += f"{_number(record.get(floor), 3):>8}{_number(theirs, 3):>8}{_number(theirs and theirs / mine, 2):>7}"
    first = "/".join(_number(record.get(key), 1) for key in ("first_call_s", "first_forward_backward_call_s"))
    return f"{text}{record['peak_mb']:>9.0f}{first:>15}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _sizes(record: Record) -> Sizes:
    return Sizes(**{name: record[name] for name in Sizes.__dataclass_fields__})


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    common = (arguments.dtype, arguments.device, arguments.backend, arguments.recompute, arguments.rep_ms)
    tasks = [
        Task(op, sizes, *common, has_graphs=arguments.graphs) for op in arguments.ops for sizes in arguments.shapes
    ]
    records = time_ours(tasks, arguments)
    records += peer_records(arguments)
    if arguments.out is not None:
        arguments.out.write_text("[\n" + ",\n".join(map(json.dumps, records)) + "\n]\n", encoding="utf-8")
    failed = [record for record in records if "failure" in record]
    told = {key: records[0][key] for key in ("gpu", "versions", "date", "source", "copy_gb_s")}
    notes = {record["note"] for record in records if "note" in record}
    print(
        "\n".join([table(records), "", str(told), *(f"{PEER_NAME}: {note}" for note in notes), f"{len(failed)} failed"])
    )
    return 1 if failed else 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    additive = [op.name for op in OPS.values() if op.kernels == "additive"]
    parser.add_argument("--ops", nargs="+", choices=list(OPS), default=additive, metavar="OP", help=", ".join(OPS))
    parser.add_argument("--shapes", nargs="+", type=_shape, default=list(SHAPES), metavar="BxTxHxD")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    parser.add_argument("--recompute", action="store_true", help="the memory-saving mode of backward")
    graphs_help = "also time recorded launches: the kernels without what Python takes to start them"
    parser.add_argument("--graphs", action="store_true", help=graphs_help)
    parser.add_argument("--peer", action="store_true", help=f"time {PEER_NAME} too, if it is installed; minutes more")
    parser.add_argument("--peer-from", type=Path, metavar="FILE", help="the lines of an earlier run of peer.py")
    parser.add_argument("--peer-shapes", type=int, default=2, metavar="N", help="its first N shapes (default: 2)")
    parser.add_argument("--no-first-call", action="store_true", help="leave out the first calls with an empty cache")
    parser.add_argument("--workers", type=int, default=14, help="processes that compile at a time (default: 14)")
    parser.add_argument("--first-call-workers", type=int, default=4, help="first calls at a time (default: 4)")
    parser.add_argument("--rep-ms", type=int, default=200, help="milliseconds spent on each figure (default: 200)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON, a record a line")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: for trying the script itself")
    parser.add_argument("--backend", default="triton", choices=("triton", "torch"))
    return parser.parse_args(argv)


def _shape(text: str) -> Sizes:
    try:
        batch, seq_len, heads, dim = map(int, text.split("x"))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected BxTxHxD such as 8x2048x16x128, got {text!r}") from error
    return Sizes(batch, seq_len, heads, heads, dim, dim)


if __name__ == "__main__":
    sys.exit(main())
