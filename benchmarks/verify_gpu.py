"""Every kernel and every configuration that can be chosen, on a GPU, each on its own, against float64.

    python benchmarks/verify_gpu.py [--family additive | delta | all] [--quick | --full] [--only WORD ...]
                                    [--minutes M] [--out FILE [--resume]]

A configuration is a recurrence with head sizes and a dtype: see ``gpu_configurations``. It runs several cases (lengths,
packed documents, gates, states) and gets one line. What counts as right: against float64 on the same rounded inputs,
|x - y| / |y| of output, final state and every gradient within ``against_float64.LIMITS``; two runs equal bit by bit;
tokens of no document zero; inputs unchanged. Fresh memory is full of NaN. An error of more than 1.3 times the median of
its kind (tensor, case, recurrence, dtype) is reported as an outlier: a wrong product in a corner of a tile can hide
below a limit.

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
from pathlib import Path
from typing import Any

import torch

from statemix.benchmarks.against_float64 import Finding, check_case
from statemix.benchmarks.bench import DTYPES
from statemix.benchmarks.gpu_configurations import Configuration, configurations
from statemix.benchmarks.measured_on import provenance, source_digest, write_records
from statemix.benchmarks.ops import OPS, names_of
from statemix.benchmarks.worker_pool import Done, run_isolated
from statemix.kernels.launch_config import TunedConfig, additive_config, device_arch, override

OUTLIER = 1.3  # times the typical error of its kind
SMALLEST_SAMPLE = 2048  # elements; the error of fewer varies by more than OUTLIER of itself
ROUNDED = {
    "bfloat16": 1e-3,
    "float16": 1.2e-4,
}  # no tensor that is rounded once is nearer; below, sums in float32 decide


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
        tiles = [_uncut(configuration, device)] if case.name.endswith("whole") else []
        with override(tiles):
            findings[case.name] = check(c.recurrence, case)
    return findings


def _uncut(c: Configuration, device: torch.device) -> TunedConfig:
    """The tiles of the table but for one thing: a single program counts as enough, so no sequence is cut."""
    arch, dtype = device_arch(device), DTYPES[c.dtype]
    config = replace(additive_config(arch, c.key_dim, c.value_dim, dtype), fill=1)
    return TunedConfig(arch, c.key_dim, c.value_dim, dtype, config)


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
    origin, where = provenance(arguments.device), Where(arguments.device, arguments.backend)
    depth = "quick" if arguments.quick else "full" if arguments.full else "usual"
    listed = [c for c in configurations(arguments.ops, depth=depth) if c.words.issuperset(arguments.only)]
    if not listed:
        sys.exit(f"only: expected words of a line, got {' '.join(arguments.only)}, which no configuration has")
    records = earlier_records(arguments.out) if arguments.resume else []
    finished = {(r["op"], r["key_dim"], r["value_dim"], r["dtype"], tuple(r["cases"]), r["blocks"]) for r in records}
    tasks = [c for c in listed if (c.op, c.key_dim, c.value_dim, c.dtype, c.sets, c.recurrence.blocks) not in finished]
    print(f"{origin}\n{len(tasks)} configurations, {len(listed) - len(tasks)} right in an earlier run", flush=True)
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
        records.append({**origin, **record(verdicts[-1], where.backend)})
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
