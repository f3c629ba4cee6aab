"""Forward, and forward and backward, of each recurrence on a GPU, beside the byte floor and flash-linear-attention.

    python benchmarks/speed.py [--family additive | delta | all] [--shapes BxTxHxD ...] [--peer] [--out FILE]

Times are medians over CUDA events (``triton.testing.do_bench``), bfloat16, on the inputs of ``ops``. The floor is the
bytes that any implementation must move (inputs read and output written once; in backward inputs and upstream gradient
read, gradients written) over the bandwidth of a large copy measured first. Peak memory is what a forward and backward
pass allocates above its inputs. The first call is that of a process with an empty Triton cache.

With --peer, ``peer.py`` times flash-linear-attention where it is installed, which takes five minutes more. Otherwise
the table has figures measured earlier on an H200, marked so.

Every call runs in a process of its own or in one that is replaced when it fails, so a crash costs one line. The shapes
come one after the other, so a run that --minutes cuts off has the first ones of every recurrence.
"""

import argparse
import importlib.util
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from statemix.benchmarks.bench import DTYPES
from statemix.benchmarks.measured_on import provenance, write_records
from statemix.benchmarks.ops import OPS, SHAPES, Sizes, names_of
from statemix.benchmarks.timed_scan import (
    Record,
    TimedScan,
    described,
    first_call,
    measure,
    measure_bandwidth,
    run_once,
)
from statemix.benchmarks.worker_pool import run_isolated

PEER = Path(__file__).with_name("peer.py")
PEER_NAME = "flash-linear-attention"
TIMEOUT_S = 240.0


def time_ours(tasks: Sequence[TimedScan], arguments: argparse.Namespace) -> list[Record]:
    """A record for every task, also for those that failed; as they come they are printed and written."""
    failures: dict[TimedScan, str] = {}
    began = time.monotonic()

    def may_start() -> bool:
        return time.monotonic() - began < arguments.minutes * 60

    by_shape = sorted(tasks, key=lambda task: arguments.shapes.index(task.sizes))
    run = partial(run_isolated, timeout_s=TIMEOUT_S, may_start=may_start)
    for compiled in run(run_once, mixed(tasks, arguments), num_workers=arguments.workers):
        if compiled.failure and not compiled.failure.startswith("OutOfMemoryError"):  # alone it may well fit
            failures[compiled.task] = compiled.failure
    print(
        f"compiled {len(tasks) - len(failures)} of {len(tasks)} calls in {time.monotonic() - began:.0f} s", flush=True
    )
    [bandwidth] = [
        done.result for done in run_isolated(measure_bandwidth, [arguments.device], num_workers=1, timeout_s=60)
    ]
    origin = {**provenance(arguments.device), "copy_gb_s": bandwidth}
    measured: dict[TimedScan, Record] = {}
    firsts: dict[TimedScan, Record] = {}

    def record(task: TimedScan) -> Record:
        found = measured.get(task, {"failure": failures.get(task, "not run")})
        return {**described(task), **with_floors(found, bandwidth), **firsts.get(task, {}), **origin}

    right = [task for task in by_shape if task not in failures]
    for done in run(measure, right, num_workers=1):
        if done.result is None:
            failures[done.task] = done.failure
        else:
            measured[done.task] = done.result
        print(f"{done.task.sizes!s:<24}{_line(record(done.task), {})}", flush=True)
        write_records(arguments.out, [record(task) for task in tasks if task in measured])
    if not arguments.no_first_call:
        called = [task for task in tasks if task.op in (arguments.first_call_ops or arguments.ops)]
        firsts = first_calls(called, arguments.first_call_workers, may_start)
    return [record(task) for task in tasks]


def mixed(tasks: Sequence[TimedScan], arguments: argparse.Namespace) -> list[TimedScan]:
    """An order in which neighbours differ in recurrence and in shape.

    Side by side no two compile the same kernels, and few take the most memory.
    """
    ops, shapes = arguments.ops, arguments.shapes
    return sorted(tasks, key=lambda task: (shapes.index(task.sizes) + ops.index(task.op)) % len(shapes))


def first_calls(tasks: Sequence[TimedScan], num_workers: int, may_start: Callable[[], bool]) -> dict[TimedScan, Record]:
    """Seconds of the first call, for the first shape of each recurrence: of forward, and of both in another process."""
    seconds: dict[TimedScan, Record] = {}
    first = {task.op: task for task in reversed(tasks)}.values()
    calls = [replace(task, is_both=is_both) for task in first for is_both in (False, True)]
    for done in run_isolated(
        first_call, calls, num_workers=num_workers, timeout_s=TIMEOUT_S, may_start=may_start, is_fresh=True
    ):
        key = "first_forward_backward_call_s" if done.task.is_both else "first_call_s"
        value = None if done.result is None else round(done.result, 2)
        seconds.setdefault(replace(done.task, is_both=True), {})[key] = value
    return seconds


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
            f"{'':<26}{'forward':>9}{'floor':>8}{'peer':>8}{'ratio':>7}{'both':>11}{'floor':>8}{'peer':>8}{'ratio':>7}"
            f"{'MB':>9}{'first call s':>15}",
        ]
        lines += [_line(record, peers.get(record["op"], {})) for record in ours]
    return "\n".join(lines)


def _line(record: Record, peer: Record) -> str:
    label = OPS[record["op"]].label + (", recomputed" if record["recompute"] else "")
    if record["forward_ms"] is None:
        return f"{label:<26}{record.get('failure', 'not run')}"
    text = f"{label:<26}"
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


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    common = (arguments.dtype, arguments.device, arguments.backend, arguments.recompute, arguments.rep_ms)
    tasks = [
        TimedScan(op, sizes, *common, has_graphs=arguments.graphs) for op in arguments.ops for sizes in arguments.shapes
    ]
    records = time_ours(tasks, arguments)
    records += peer_records(arguments)
    write_records(arguments.out, records)
    failed = [record for record in records if "failure" in record]
    origin = {key: records[0][key] for key in ("gpu", "versions", "date", "source", "copy_gb_s")}
    notes = {record["note"] for record in records if "note" in record}
    print(
        "\n".join(
            [table(records), "", str(origin), *(f"{PEER_NAME}: {note}" for note in notes), f"{len(failed)} failed"]
        )
    )
    return 1 if failed else 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=("additive", "delta", "all"), default="additive", help="default: additive")
    parser.add_argument("--ops", nargs="+", choices=list(OPS), metavar="OP", help="in place of those of a family")
    parser.add_argument("--shapes", nargs="+", type=_shape, default=list(SHAPES), metavar="BxTxHxD")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    parser.add_argument("--recompute", action="store_true", help="the memory-saving mode of backward")
    graphs_help = "also time recorded launches: the kernels without what Python takes to start them"
    parser.add_argument("--graphs", action="store_true", help=graphs_help)
    parser.add_argument("--peer", action="store_true", help=f"time {PEER_NAME} too, if it is installed; minutes more")
    parser.add_argument("--peer-from", type=Path, metavar="FILE", help="the lines of an earlier run of peer.py")
    parser.add_argument("--peer-shapes", type=int, default=2, metavar="N", help="its first N shapes (default: 2)")
    parser.add_argument("--no-first-call", action="store_true", help="leave out the first calls with an empty cache")
    first_help = "only their first calls (default: those of all)"
    parser.add_argument("--first-call-ops", nargs="+", choices=list(OPS), metavar="OP", help=first_help)
    parser.add_argument("--workers", type=int, default=14, help="processes that compile at a time (default: 14)")
    parser.add_argument("--first-call-workers", type=int, default=4, help="first calls at a time (default: 4)")
    parser.add_argument("--rep-ms", type=int, default=200, help="milliseconds spent on each figure (default: 200)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no call after this long, but the peer's")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON, a record a line, kept up to date")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: for trying the script itself")
    parser.add_argument("--backend", default="triton", choices=("triton", "torch"))
    arguments = parser.parse_args(argv)
    arguments.ops = arguments.ops or names_of(arguments.family)
    return arguments


def _shape(text: str) -> Sizes:
    try:
        batch, seq_len, heads, dim = map(int, text.split("x"))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected BxTxHxD such as 8x2048x16x128, got {text!r}") from error
    return Sizes(batch, seq_len, heads, heads, dim, dim)


if __name__ == "__main__":
    sys.exit(main())
