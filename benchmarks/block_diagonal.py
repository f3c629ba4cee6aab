"""What block-diagonal Householders cost beside one dense Householder, and beside separate heads, of one state size.

    python benchmarks/block_diagonal.py [--ops OP ...] [--minutes M] [--out FILE]

A state has K x V numbers a head. Beside H heads of K channels stand the same heads in 2 and 4 blocks, 2 H and 4 H heads
of K / 2 and K / 4 channels, and H / 4 heads of 4 K channels in 8 blocks, which no dense kernel holds. Separate heads
have values of their own; the blocks of a head share one, and their read-outs are summed.

Forward, forward and backward, and peak memory, as benchmarks/speed.py takes them. About a minute and a half.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from statemix.bench import DTYPES
from statemix.measured_on import provenance, write_records
from statemix.ops import OPS, Sizes
from statemix.timed_scan import Record, TimedScan, measure, timed_in_turn

OPS_TIMED = ("deltanet", "gated_deltanet", "kda")


def tasks_of(arguments: argparse.Namespace) -> list[TimedScan]:
    """Six layouts of every recurrence."""
    a = arguments
    layouts = [(a.num_heads, a.key_dim, 0)]
    for parts in (2, 4):
        layouts += [(a.num_heads, a.key_dim, parts), (a.num_heads * parts, a.key_dim // parts, 0)]
    layouts.append((max(1, a.num_heads // 4), 4 * a.key_dim, 8))
    common = (a.dtype, a.device, a.backend, False, a.rep_ms)
    return [
        TimedScan(
            f"{op}_blocks" if blocks else op,
            Sizes(a.batch, a.seq_len, heads, heads, key_dim, a.value_dim),
            *common,
            blocks=blocks,
        )
        for op in a.ops
        for heads, key_dim, blocks in layouts
    ]


def line(record: Record) -> str:
    heads, key_dim, blocks = record["num_heads"], record["key_dim"], record["blocks"]
    layout = f"{heads} heads of K {key_dim}" + (f" in {blocks} blocks of {key_dim // blocks}" if blocks > 1 else "")
    text = f"{OPS[record['op'].removesuffix('_blocks')].label:<16}{layout:<40}"
    if record["forward_ms"] is None:
        return text + str(record["failure"])
    return text + f"{record['forward_ms']:>9.3f}{record['forward_backward_ms']:>9.3f}{record['peak_mb']:>9.0f}"


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    tasks = tasks_of(arguments)
    records: list[Record] = []
    print(f"{'':<56}{'forward':>9}{'both':>9}{'MB':>9}", flush=True)
    for _, record in timed_in_turn(
        tasks,
        measure,
        to_compile=tasks,
        num_workers=arguments.workers,
        minutes=arguments.minutes,
        told=provenance(arguments.device),
    ):
        records.append(record)
        print(line(record), flush=True)
        write_records(arguments.out, records)
    failed = sum("failure" in record for record in records)
    print(f"{failed} failed, {len(tasks) - len(records)} not run")
    return 1 if failed else 2 if len(records) < len(tasks) else 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", nargs="+", choices=list(OPS_TIMED), default=list(OPS_TIMED), metavar="OP")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--num-heads", type=int, default=8, help="H of the dense heads (default: 8)")
    parser.add_argument("--key-dim", type=int, default=256, help="K of the dense heads (default: 256)")
    parser.add_argument("--value-dim", type=int, default=128)
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    parser.add_argument("--workers", type=int, default=14, help="processes that compile at a time (default: 14)")
    parser.add_argument("--rep-ms", type=int, default=200, help="milliseconds spent on each figure (default: 200)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no call after this long")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON, a record a line, kept up to date")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: for trying the script itself")
    parser.add_argument("--backend", default="triton", choices=("triton", "torch"))
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
