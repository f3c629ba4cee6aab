"""The chunk form against the recurrent kernel, forward only, for short and long sequences of the same tokens.

    python benchmarks/chunk_against_recurrent.py [--ops OP ...] [--head-dims D ...] [--minutes M] [--out FILE]

Every call has --tokens tokens in all, batch = tokens / T sequences of T, and heads of D = K = V that together are
--width wide. The recurrent kernel reads and writes what it must and no more, one token after another; the chunk form
has matrix products, and programs along the sequence. Times are medians over CUDA events, bfloat16, in milliseconds.

With sixteen cores: about half a minute to compile, then two minutes. docs/figures.py draws the file that is written.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Literal

from statemix.benchmarks.ops import OPS, Sizes
from statemix.benchmarks.timed_scan import (
    Record,
    TimedScan,
    add_timing_options,
    exit_code,
    measure_forward,
    written_in_turn,
)

OPS_TIMED = ("deltanet", "gated_deltanet", "kda", "deltaproduct", "gla", "mamba2")
LENGTHS = tuple(512 << n for n in range(7))
FORMS: tuple[Literal["chunk", "recurrent"], ...] = ("chunk", "recurrent")


def tasks_of(arguments: argparse.Namespace) -> list[TimedScan]:
    """Heads of 128 channels first, both forms of a size side by side."""
    found = []
    for head_dim in sorted(arguments.head_dims, key=lambda dim: (dim != 128, dim)):
        heads = max(1, arguments.width // head_dim)
        for op in arguments.ops:
            for seq_len in arguments.lengths:
                sizes = Sizes(max(1, arguments.tokens // seq_len), seq_len, heads, heads, head_dim, head_dim)
                common = (arguments.dtype, arguments.device, arguments.backend, False, arguments.rep_ms)
                found += [TimedScan(op, sizes, *common, is_both=False, form=form) for form in FORMS]
    return found


def line(record: Record) -> str:
    sizes = Sizes(**{name: record[name] for name in Sizes.__dataclass_fields__})
    time = "-" if record["forward_ms"] is None else f"{record['forward_ms']:.3f} ms"
    return f"{OPS[record['op']].label:<20}{sizes!s:<24}{record['form']:<12}{time:>14}  {record.get('failure', '')}"


def table(records: Sequence[Record]) -> str:
    """For each recurrence and length how many times as fast the chunk form is, by the size of heads."""
    times = {(r["op"], r["seq_len"], r["key_dim"], r["form"]): r["forward_ms"] for r in records if r["forward_ms"]}
    ops, lengths, dims = (sorted({key[n] for key in times}, key=_order) for n in range(3))
    lines = [f"{'recurrent over chunk':<20}{'T':>8}" + "".join(f"{f'D{dim}':>9}" for dim in dims)]
    for op in ops:
        for seq_len in lengths:
            text = f"{OPS[op].label:<20}{seq_len:>8}"
            for dim in dims:
                chunk, recurrent = (times.get((op, seq_len, dim, form)) for form in FORMS)
                text += f"{recurrent / chunk:>9.2f}" if chunk and recurrent else f"{'-':>9}"
            lines.append(text)
    return "\n".join(lines)


def _order(value: str | int) -> int:
    return value if isinstance(value, int) else list(OPS).index(value)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    tasks = tasks_of(arguments)
    ends = (min(arguments.lengths), max(arguments.lengths))  # in between nothing else is compiled
    to_compile = [task for task in tasks if task.sizes.seq_len in ends]
    records = written_in_turn(tasks, measure_forward, arguments, to_compile=to_compile, line=line)
    print(f"\n{table(records)}\n")
    return exit_code(records, len(tasks))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", nargs="+", choices=list(OPS), default=list(OPS_TIMED), metavar="OP")
    parser.add_argument("--head-dims", nargs="+", type=int, default=[64, 128, 256], metavar="D")
    parser.add_argument("--lengths", nargs="+", type=int, default=list(LENGTHS), metavar="T")
    parser.add_argument("--tokens", type=int, default=32768, help="in all sequences of a call (default: 32768)")
    parser.add_argument("--width", type=int, default=2048, help="channels of all heads (default: 2048)")
    add_timing_options(parser, rep_ms=60)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
