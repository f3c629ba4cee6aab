"""What block-diagonal Householders cost beside one dense Householder, and beside separate heads, of one state size.

    python benchmarks/block_diagonal.py [--ops OP ...] [--minutes M] [--out FILE]

A state has K x V numbers a head. Beside H heads of K channels stand the same heads in 2 and 4 blocks, 2 H and 4 H heads
of K / 2 and K / 4 channels, and H / 4 heads of 4 K channels in 8 blocks, which no dense kernel holds. Separate heads
have values of their own; the blocks of a head share one, and their read-outs are summed.

Forward, forward and backward, and peak memory, as benchmarks/speed.py --graphs takes them. About two minutes.
"""

import argparse
import sys
from collections.abc import Sequence

from statemix.benchmarks.ops import OPS, Sizes
from statemix.benchmarks.timed_scan import Record, TimedScan, add_timing_options, exit_code, measure, written_in_turn

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
            has_graphs=a.device == "cuda",
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
    for key in ("forward_ms", "forward_backward_ms"):
        graph = record.get(f"graph_{key}")
        text += f"{record[key]:>9.3f}" + (f" ({graph:.3f})" if graph else "")
    return text + f"{record['peak_mb']:>9.0f}"


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    tasks = tasks_of(arguments)
    print(f"{'':<56}{'forward':>9}{'both':>9}{'MB':>9}", flush=True)
    records = written_in_turn(tasks, measure, arguments, to_compile=tasks, line=line)
    return exit_code(records, len(tasks))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", nargs="+", choices=list(OPS_TIMED), default=list(OPS_TIMED), metavar="OP")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--num-heads", type=int, default=8, help="H of the dense heads (default: 8)")
    parser.add_argument("--key-dim", type=int, default=256, help="K of the dense heads (default: 256)")
    parser.add_argument("--value-dim", type=int, default=128)
    add_timing_options(parser, rep_ms=200)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
