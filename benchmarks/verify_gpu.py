"""Every kernel and every configuration that can be chosen, on a GPU, each on its own, against float64.

    python benchmarks/verify_gpu.py [--family additive | delta | all] [--quick | --full] [--only WORD ...]
                                    [--minutes M] [--out FILE [--resume]]

A configuration is a recurrence with head sizes and a dtype: sizes for each tile that the table of configurations has,
filled exactly and in part. It runs several cases (lengths, packed documents, gates, states; see ``CASES``) and gets one
line. What counts as right: against float64 on the same rounded inputs, |x - y| / |y| of output, final state and every
gradient within ``against_float64.LIMITS``; two runs equal bit by bit; rows of no document zero; inputs unchanged. Fresh
memory is full of NaN. An error of more than 1.3 times the median of its kind (tensor, case, recurrence, dtype) is
reported as an outlier: a wrong product in a corner of a tile can hide below a limit.

Of the delta family, DeltaNet, gated DeltaNet and KDA meet every tile; every other combination of gate, direction, steps
and blocks runs the same kernels and meets some.

Configurations run in processes of their own and mostly compile. One that crashes or hangs costs its line.
On sixteen cores a usual run takes four minutes for the additive family and five for the delta family, a quick one two.
Exit code: 0 all right, 1 a configuration is wrong, crashed or hung, 2 some were not run for lack of time.
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from statemix.benchmarks.against_float64 import Case, Finding, check_case
from statemix.benchmarks.bench import DTYPES
from statemix.benchmarks.measured_on import provenance, source_digest, write_records
from statemix.benchmarks.ops import OPS, names_of
from statemix.benchmarks.worker_pool import Done, run_isolated
from statemix.harness.recurrences import Recurrence
from statemix.kernels.launch_config import TunedRow, additive_config, device_family, override

OUTLIER = 1.3  # times the typical error of its kind
SMALLEST_SAMPLE = 2048  # elements; the error of fewer varies by more than OUTLIER of itself
ROUNDED = {
    "bfloat16": 1e-3,
    "float16": 1.2e-4,
}  # no tensor that is rounded once is nearer; below, sums in float32 decide

# (key_dim, value_dim): widths 16 to 512 that the tiles of K are padded to, with widths 16, 32 and 64 of V, or several
# blocks of 64. In a pair of rows the first fills its tiles exactly and the second does not.
PAIRS = (
    ((16, 16), (4, 12)),
    ((16, 32), (12, 24)),
    ((16, 64), (8, 100)),
    ((32, 16), (20, 4)),
    ((32, 32), (24, 20)),
    ((32, 128), (20, 40)),
    ((64, 16), (40, 12)),
    ((64, 32), (48, 24)),
    ((64, 64), (40, 72)),
    ((128, 16), (100, 8)),
    ((128, 32), (72, 20)),
    ((128, 128), (100, 40)),
    ((256, 16), (160, 12)),
    ((256, 32), (200, 24)),
    ((256, 256), (160, 320)),
    ((512, 16), (320, 4)),
    ((512, 32), (260, 20)),
    ((512, 512), (320, 100)),
)

# Cases of one line share most compiled kernels; the lines differ in what is absent (states, offsets, saved tensors).
CASES: dict[str, tuple[Case, ...]] = {
    "batch": (
        Case("t1", 2, 1),
        Case("t17 strong", 2, 17, gates="strong"),
        Case("t64 zero", 2, 64, gates="zero"),
        Case("t65 scaled", 3, 65, scale=0.3),
        Case("t200 resets", 2, 200, gates="resets"),
        Case("t200 mixed", 1, 200, gates="mixed"),
        Case("t65 strided", 2, 65, is_strided=True),
    ),
    "long": (Case("t1000 segments", 1, 1000), Case("t1000 whole", 1, 1000, gates="mixed")),
    "packed": (
        Case("t200 packed", 1, 200, offsets=(0, 0, 5, 70, 134, 134, 180)),
        Case("t1000 packed", 1, 1000, offsets=(0, 10, 10, 37, 700, 700, 999), gates="mixed"),
    ),
    "stateless": (Case("t65 stateless", 2, 65, has_state=False), Case("t700 stateless", 1, 700, has_state=False)),
    "recomputed": (
        Case("t200 recomputed", 2, 200, options=(("recompute", True),)),
        Case("t1000 recomputed", 1, 1000, options=(("recompute", True),)),
    ),
    "ungrouped": (Case("t65 ungrouped", 2, 65, num_heads=3, num_value_heads=3, has_narrow_gates=True),),
    "recurrent": (
        Case("t17 recurrent", 2, 17, form="recurrent"),
        Case("t200 recurrent", 1, 200, form="recurrent", offsets=(0, 0, 5, 70, 134, 134, 180)),
    ),
}
COMMON = ((64, 64), (128, 128))  # run every case, whatever the turn
ROTATING = ("packed", "long", "stateless", "recomputed", "ungrouped", "recurrent")

# Those of the delta family. T = 700 and more is cut into segments for the few heads of most cases.
DELTA_CASES: dict[str, tuple[Case, ...]] = {
    "batch": (
        Case("t1", 2, 1),
        Case("t17 strong", 2, 17, gates="strong"),
        Case("t64 zero", 2, 64, gates="zero", rates="to two"),
        Case("t65 scaled", 3, 65, scale=0.3),
        Case("t200 resets", 2, 200, gates="resets", rates="to two"),
        Case("t200 mixed", 1, 200, gates="mixed"),
        Case("t200 equal", 1, 200, gates="zero", rates="one", has_equal_keys=True),
        Case("t200 equal two", 1, 200, gates="zero", rates="two", has_equal_keys=True),
        Case("t65 strided", 2, 65, is_strided=True),
    ),
    "long": (Case("t1000 segments", 1, 1000, rates="to two"),),
    "packed": (
        Case("t200 packed", 1, 200, offsets=(0, 0, 5, 70, 134, 134, 180), rates="to two"),
        Case("t900 packed", 1, 900, offsets=(0, 10, 10, 37, 700, 700, 899), gates="mixed"),
    ),
    "stateless": CASES["stateless"],
    "recomputed": (
        Case("t200 recomputed", 2, 200, options=(("recompute", True),)),
        Case("t700 recomputed", 1, 700, options=(("recompute", True),)),
    ),
    "ungrouped": CASES["ungrouped"],
    "recurrent": (
        Case("t17 recurrent", 2, 17, form="recurrent", rates="to two"),
        Case("t200 recurrent", 1, 200, form="recurrent", offsets=(0, 0, 5, 70, 134, 134, 180)),
    ),
}

HeadSizes = tuple[tuple[int, int], ...]

EVERY_TILE = ("deltanet", "gated_deltanet", "kda")
# (key_dim, value_dim) of the other combinations: exact ones, such that fill their tiles in part, and in blocks.
EXACT = ((64, 64), (128, 128), (256, 128))
IN_PART = ((100, 40), (40, 72), (200, 24), (20, 40), (16, 100), (320, 20))
BLOCKS_OF_64_OR_128 = ((128, 64), (256, 128))
BLOCKS_IN_PART = ((200, 40), (80, 72), (144, 20), (40, 100))
EIGHT_BLOCKS = ((512, 64), (1024, 128))  # without steps and along the write key only


@dataclass(frozen=True)
class Configuration:
    """One line: a recurrence, head sizes, a dtype and the sets of cases to run; ``blocks`` of the row unless given."""

    op: str
    key_dim: int
    value_dim: int
    dtype: str
    sets: tuple[str, ...]
    blocks: int = 0

    @property
    def recurrence(self) -> Recurrence:
        return OPS[self.op].in_blocks(self.blocks) if self.blocks else OPS[self.op]

    @property
    def words(self) -> set[str]:
        return {*str(self).split(), *self.sets}

    def __str__(self) -> str:
        sets = "all" if self.sets == tuple(CASES) else "+".join(self.sets)
        blocks = f" b{self.blocks}" if self.blocks else ""
        return f"{self.op}{blocks} K{self.key_dim} V{self.value_dim} {self.dtype} {sets}"

    @property
    def cases(self) -> list[Case]:
        known = CASES if self.recurrence.kernels == "additive" else DELTA_CASES
        return [case for name in self.sets for case in known[name]]


@dataclass(frozen=True)
class Where:
    """Device and backend, for every configuration."""

    device: str
    backend: str


@dataclass(frozen=True)
class Verdict:
    """What came of a configuration: status is right, wrong or failed (it crashed, hung or raised)."""

    configuration: Configuration
    status: str
    faults: tuple[str, ...]
    findings: dict[str, Finding]
    seconds: float

    @property
    def worst(self) -> tuple[float, float]:
        """The largest error of results, and of gradients."""
        named = [pair for finding in self.findings.values() for pair in finding.errors.items()]
        results = max((error for name, error in named if not name.startswith("d ")), default=0.0)
        return results, max((error for name, error in named if name.startswith("d ")), default=0.0)


def configurations(ops: Sequence[str], *, depth: str) -> list[Configuration]:
    """The list to run, the slowest to compile first, so that none of them comes at the end.

    "quick": for every width of K one width of V. "usual": all pairs of widths, filled exactly and in part by turns,
    with one more set of cases each by turns. "full": everything. Combinations that share their kernels run fewer.
    """
    additive, every_tile, others = (
        [op for op in ops if _share(op) == share] for share in ("additive", "every tile", "some tiles")
    )
    listed = _for_every_tile(additive, depth=depth) + _for_every_tile(every_tile, depth=depth)
    listed += [c for number, op in enumerate(others) for c in _for_some_tiles(op, number, depth=depth)]
    return sorted(listed, key=lambda one: -one.key_dim)


def _share(op: str) -> str:
    if OPS[op].kernels == "additive":
        return "additive"
    return "every tile" if op in EVERY_TILE else "some tiles"


def _for_every_tile(ops: Sequence[str], *, depth: str) -> list[Configuration]:
    """Pairs of widths in bfloat16; fewer of the delta family in float32, slow to compile; float16 a third."""
    listed = []
    for op_number, (k_number, v_number) in product(range(len(ops)), product(range(len(PAIRS) // 3), range(3))):
        pair, is_delta = PAIRS[3 * k_number + v_number], OPS[ops[op_number]].kernels == "delta"
        for dtype_number, dtype in enumerate(("bfloat16", "float32", "float16")):
            if depth == "full":
                listed += [Configuration(ops[op_number], *sizes, dtype, tuple(CASES)) for sizes in pair]
                continue
            is_third = v_number == (k_number + dtype_number + is_delta * op_number) % 3
            is_thin = dtype == "float16" or (is_delta and dtype == "float32")
            if (depth == "quick" and (not is_third or dtype == "float16")) or (is_thin and not is_third):
                continue
            if is_delta and dtype != "bfloat16" and (depth == "quick" or dtype == "float16") and k_number % 2:
                continue
            turn = v_number + k_number + 5 * op_number + dtype_number
            sizes = pair[turn % 2]
            sets: tuple[str, ...] = ("batch", ROTATING[(turn + k_number) % len(ROTATING)])
            if dtype == "bfloat16" and depth == "usual" and pair[0] in COMMON:
                sizes, sets = pair[0], tuple(CASES)
            listed.append(Configuration(ops[op_number], *sizes, dtype, sets))
    return listed


def _for_some_tiles(op: str, number: int, *, depth: str) -> list[Configuration]:
    """An exact pair and one in part in bfloat16, one in float32, by turns; block-diagonal ones in eight blocks too."""
    recurrence = OPS[op]
    has_blocks = recurrence.blocks > 1
    exact: HeadSizes = BLOCKS_OF_64_OR_128 if has_blocks else EXACT
    in_part: HeadSizes = BLOCKS_IN_PART if has_blocks else IN_PART
    in_eight: HeadSizes = EIGHT_BLOCKS if has_blocks and recurrence.is_timed else ()
    if depth == "full":
        return [
            Configuration(op, *sizes, dtype, tuple(CASES), 8 if sizes in in_eight else 0)
            for sizes in (*exact, *in_part, *in_eight)
            for dtype in ("bfloat16", "float32", "float16")
        ]
    sets = [("batch", ROTATING[(number + turn) % len(ROTATING)]) for turn in range(4)]
    found = [Configuration(op, *exact[number % len(exact)], "bfloat16", sets[0])]
    if depth == "usual" or number % 3 == 0:
        found.append(Configuration(op, *in_part[number % len(in_part)], "float32", sets[1]))
    if depth == "usual":
        narrow = "float16" if number % 4 == 3 else "bfloat16"
        found.append(Configuration(op, *in_part[(number + 1) % len(in_part)], narrow, sets[2]))
        found += [Configuration(op, *sizes, "bfloat16", sets[3], 8) for sizes in in_eight]
    return found


def verify(configuration: Configuration, where: Where) -> dict[str, Finding]:
    """Run the cases of a configuration, in this process."""
    torch.set_num_threads(1)
    torch.zeros(4).exp()  # on some CPUs the first exp after matrix products can be slightly wrong
    c, device = configuration, torch.device(where.device)
    check = partial(
        check_case,
        key_dim=c.key_dim,
        value_dim=c.value_dim,
        dtype=DTYPES[c.dtype],
        device=device,
        backend=where.backend,
    )
    findings = {}
    for case in c.cases:
        rows = [_uncut(configuration, device)] if case.name.endswith("whole") else []
        with override(rows):
            findings[case.name] = check(c.recurrence, case)
    return findings


def _uncut(c: Configuration, device: torch.device) -> TunedRow:
    """The row of the table but for one thing: a single program counts as enough, so no sequence is cut."""
    family, dtype = device_family(device), DTYPES[c.dtype]
    config = replace(additive_config(family, c.key_dim, c.value_dim, dtype), fill=1)
    return TunedRow(family, c.key_dim, c.value_dim, dtype, config)


def verdict(done: Done[Configuration, dict[str, Finding]]) -> Verdict:
    if done.result is None:
        return Verdict(done.task, "failed", (done.failure,), {}, done.seconds)
    faults = tuple(f"{name}: {fault}" for name, finding in done.result.items() for fault in finding.faults)
    return Verdict(done.task, "wrong" if faults else "right", faults, done.result, done.seconds)


def outliers(verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Errors far above the median of their kind, 16-bit only: in float32 the lengths of the sums decide."""
    kinds: dict[tuple[str, ...], list[tuple[Verdict, float]]] = defaultdict(list)
    for one in verdicts:
        for case, finding in one.findings.items():
            for tensor, error in finding.errors.items():
                if one.configuration.dtype in ROUNDED and finding.num_elements[tensor] >= SMALLEST_SAMPLE:
                    kinds[tensor, case, one.configuration.op, one.configuration.dtype].append((one, error))
    for (tensor, case, _, dtype), found in kinds.items():
        typical = statistics.median(error for _, error in found)
        for one, error in found:
            if len(found) >= 4 and error > max(OUTLIER * typical, ROUNDED[dtype]):
                yield f"{one.configuration}: {case}: {tensor} {error:.2e}, typically {typical:.2e}"


def line(one: Verdict) -> str:
    results, gradients = one.worst
    end = f"{results:.1e} {gradients:.1e}" if one.findings else ""
    text = f"{one.status:<7}{one.configuration!s:<72}{end:<17}{one.seconds:>6.1f} s"
    return "\n".join([text, *(f"       {fault}" for fault in one.faults[:6])])


def record(one: Verdict, backend: str) -> dict[str, Any]:
    """The verdict as an entry of the JSON: of each tensor the largest error and the case it belongs to."""
    c, worst = one.configuration, dict[str, tuple[float | str, str]]()
    for case, finding in one.findings.items():
        for tensor, error in finding.errors.items():
            if tensor not in worst or error > float(worst[tensor][0]):
                worst[tensor] = (_three_digits(error), case)
    return {
        "op": c.op,
        "key_dim": c.key_dim,
        "value_dim": c.value_dim,
        "count": c.recurrence.count,
        "blocks": c.recurrence.blocks,
        "dtype": c.dtype,
        "cases": list(c.sets),
        "num_cases": len(one.findings),
        "backend": backend,
        "status": one.status,
        "faults": list(one.faults),
        "errors": worst,
        "seconds": round(one.seconds, 1),
    }


def _three_digits(error: float) -> float | str:
    return float(f"{error:.2e}") if math.isfinite(error) else str(error)


def earlier_records(path: Path) -> list[dict[str, Any]]:
    """The right ones of an earlier run over the same source; others are run again."""
    if not path.is_file():
        return []
    return [
        entry
        for entry in json.loads(path.read_text(encoding="utf-8"))
        if entry["status"] == "right" and entry["source"] == source_digest()
    ]


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    told, where = provenance(arguments.device), Where(arguments.device, arguments.backend)
    depth = "quick" if arguments.quick else "full" if arguments.full else "usual"
    wanted = [c for c in configurations(arguments.ops, depth=depth) if c.words.issuperset(arguments.only)]
    if not wanted:
        sys.exit(f"only: expected words of a line, got {' '.join(arguments.only)}, which no configuration has")
    records = earlier_records(arguments.out) if arguments.resume else []
    finished = {(r["op"], r["key_dim"], r["value_dim"], r["dtype"], tuple(r["cases"]), r["blocks"]) for r in records}
    tasks = [c for c in wanted if (c.op, c.key_dim, c.value_dim, c.dtype, c.sets, c.recurrence.blocks) not in finished]
    print(f"{told}\n{len(tasks)} configurations, {len(wanted) - len(tasks)} right in an earlier run", flush=True)
    began = time.monotonic()
    verdicts: list[Verdict] = []
    for done in run_isolated(
        partial(verify, where=where),
        tasks,
        num_workers=arguments.workers,
        timeout_s=arguments.timeout,
        may_start=lambda: time.monotonic() - began < arguments.minutes * 60,
    ):
        verdicts.append(verdict(done))
        print(line(verdicts[-1]), flush=True)
        records.append({**told, **record(verdicts[-1], where.backend)})
        write_records(arguments.out, records)
    return _summary(verdicts, len(tasks), time.monotonic() - began)


def _summary(verdicts: list[Verdict], num_tasks: int, seconds: float) -> int:
    """Print what is not right, outliers and totals; the exit code."""
    strange = list(outliers(verdicts))
    print(f"\n{len(strange)} errors above {OUTLIER} times the median of their kind")
    print("\n".join(strange[:20]))
    bad = [one for one in verdicts if one.status != "right"]
    print(f"\n{len(bad)} not right")
    print("\n".join(line(one) for one in bad[:30]))
    for dtype in DTYPES:
        worst = [one.worst for one in verdicts if one.configuration.dtype == dtype and one.findings]
        if worst:
            results, gradients = (max(column) for column in zip(*worst, strict=True))
            print(
                f"{dtype:<10}{len(worst):>4} configurations, largest error {results:.1e}, of gradients {gradients:.1e}"
            )
    left = num_tasks - len(verdicts)
    num_cases = sum(len(one.findings) for one in verdicts)
    print(f"{len(verdicts) - len(bad)} right, {len(bad)} not, {left} not run; {num_cases} cases in {seconds:.0f} s")
    return 1 if bad else 2 if left else 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    depth = parser.add_mutually_exclusive_group()
    depth.add_argument("--quick", action="store_true", help="a third of the configurations")
    depth.add_argument("--full", action="store_true", help="every configuration with every case; see --resume")
    parser.add_argument("--family", choices=("additive", "delta", "all"), default="additive", help="default: additive")
    ops_help = f"in place of those of a family: {', '.join(OPS)}"
    parser.add_argument("--ops", nargs="+", choices=list(OPS), metavar="OP", help=ops_help)
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="WORD", help="lines with all of these words, such as gla K64 bfloat16"
    )
    parser.add_argument("--workers", type=int, default=14, help="processes at a time (default: 14)")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one configuration (default: 300)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no configuration after this long")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON, kept up to date while the script runs")
    parser.add_argument("--resume", action="store_true", help="keep what FILE says is right for the same source")
    parser.add_argument("--device", default="cuda", help="cpu: for trying the script itself")
    parser.add_argument("--backend", default="triton", choices=("triton", "torch"))
    arguments = parser.parse_args(argv)
    if arguments.resume and arguments.out is None:
        parser.error("--resume: expected beside --out FILE")
    arguments.ops = arguments.ops or names_of(arguments.family, timed_only=False)
    return arguments


if __name__ == "__main__":
    sys.exit(main())
