"""Compile every variant of every kernel for every arch of devices under several versions of Triton, with no GPU.

    make compile-matrix                                  the three versions, and docs/results/compile-matrix.json
    python tools/compile_matrix.py build/triton-3.6.0    the same with the versions in these folders
    python tools/compile_matrix.py                       compile nothing: what is missing, or the JSON with new names
    python tools/compile_matrix.py --sample sm_90        a few variants under the installed Triton, as JSON lines
    python tools/compile_matrix.py --launches FILE       every launch of every call, to compare two states of the code

A folder is what ``pip install --target`` made; it goes before the environment's own packages. Results are kept in
build/compile-matrix.jsonl as they come and are found again by the digest of a variant's code and settings, so a second
run compiles what changed; other names, comments and places change nothing. When it is what a result says that changes,
remove that file and the JSON first.

The JSON holds one line a variant, with a list for each version of Triton; its names stand in "columns". "compiled" says
which archs are complete under which version: those asked for, and what earlier runs have left.
"""

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import asdict, fields
from itertools import product
from pathlib import Path
from queue import SimpleQueue
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))  # `make` exports PYTHONSAFEPATH

import torch  # noqa: E402
import triton  # noqa: E402
from compiler_process import CompilerProcess  # noqa: E402
from kernel_calls import SAMPLE, configurations, label, record  # noqa: E402
from kernel_variants import Result, Variant, variants_of  # noqa: E402

from statemix.kernels.launch_config import ARCHS, Arch  # noqa: E402

MATRIX = ROOT / "docs" / "results" / "compile-matrix.json"
KEPT = ROOT / "build" / "compile-matrix.jsonl"
COLUMNS = [field.name for field in fields(Result)]
SLOW = 10.0  # seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, help="Triton versions, each in a folder of its own")
    parser.add_argument("--sample", choices=ARCHS, help="compile a sample for this arch")
    parser.add_argument("--archs", nargs="+", choices=ARCHS, default=ARCHS, help="leave out the others")
    parser.add_argument("--keep", action="store_true", help="compile all under the installed Triton into build/")
    parser.add_argument("--launches", type=Path, help="write every launch into this file")
    arguments = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET", "0") != "0":
        parser.error("TRITON_INTERPRET: expected it to be unset, since interpreted kernels cannot be compiled")
    if arguments.sample:
        sample = calls_by_variant([arguments.sample], SAMPLE)
        for variant, result in compile_all(sample, 1):
            line = {"key": variant.key, "kernel": variant.kernel, "call": sample[variant]} | asdict(result)
            print(json.dumps(line), flush=True)
    elif arguments.keep:
        keep_all(arguments.archs)
    elif arguments.launches:
        write_launches(arguments.launches)
    else:
        archs = tuple(arguments.archs)
        for folder in arguments.folders:
            path = {"PYTHONPATH": str(folder.resolve())}
            command = [sys.executable, __file__, "--keep", "--archs", *archs]
            subprocess.run(command, check=True, env=os.environ | path)
        versions = [folder.name.removeprefix("triton-") for folder in arguments.folders]
        sys.exit(write_matrix(versions or list(json.loads(MATRIX.read_text())["compiled"]), archs) > 0)


def calls_by_variant(archs: Iterable[Arch], calls: Iterable[Any] | None = None) -> dict[Variant, str]:
    """Every variant with the first call that needs it."""
    found: dict[Variant, str] = {}
    for arch in archs:
        for configuration in configurations() if calls is None else calls:
            for variant in variants_of(record(configuration, arch), arch):
                found.setdefault(variant, label(configuration))
    return found


def compile_all(variants: Iterable[Variant], num_processes: int) -> Iterator[tuple[Variant, Result]]:
    """Compile in ``num_processes`` processes; results in the order in which they come."""
    compilers: SimpleQueue[CompilerProcess] = SimpleQueue()

    def compile_one(variant: Variant) -> Result:
        compiler = compilers.get()
        try:
            return compiler.compile(variant)
        finally:
            compilers.put(compiler)

    with ExitStack() as stack:
        for _ in range(num_processes):
            compilers.put(stack.enter_context(CompilerProcess()))
        threads = stack.enter_context(ThreadPoolExecutor(num_processes))
        variant_of = {threads.submit(compile_one, variant): variant for variant in variants}
        for future in as_completed(variant_of):
            yield variant_of[future], future.result()


def keep_all(archs: Iterable[Arch]) -> None:
    """Compile what is not kept yet under the Triton that is imported, on all cores."""
    known = {(line["key"], line["triton"]) for line in kept()}
    missing = [variant for variant in calls_by_variant(archs) if (variant.key, triton.__version__) not in known]
    print(f"Triton {triton.__version__}: {len(missing)} variants to compile", flush=True)
    KEPT.parent.mkdir(exist_ok=True)
    with KEPT.open("a") as file:
        for count, (variant, result) in enumerate(compile_all(missing, os.cpu_count() or 1), start=1):
            line = {"key": variant.key, "triton": triton.__version__} | asdict(result)
            file.write(json.dumps(line) + "\n")
            file.flush()
            if result.fault is not None or count % 100 == 0:
                print(f"  {count}: {variant.arch} {variant.kernel} {result.fault or ''}", flush=True)


def kept() -> Iterator[dict[str, Any]]:
    """Results of earlier runs: of the committed file, then of the folder build."""
    if MATRIX.exists():
        for entry in json.loads(MATRIX.read_text())["variants"]:
            for version, values in entry["results"].items():
                yield {"key": entry["key"], "triton": version} | dict(zip(COLUMNS, values, strict=True))
    if KEPT.exists():
        yield from map(json.loads, KEPT.read_text().splitlines())


def write_matrix(versions: list[str], archs: tuple[Arch, ...]) -> int:
    """Put what is complete into the file for the documentation; the number of variants in it that must not run."""
    results = {(line["key"], line["triton"]): [line[name] for name in COLUMNS] for line in kept()}
    variants = {arch: calls_by_variant([arch]) for arch in ARCHS}

    def missing(version: str, arch: Arch) -> list[Variant]:
        return [variant for variant in variants[arch] if (variant.key, version) not in results]

    known = sorted({version for _, version in results}, key=_numbers)
    compiled = {version: [arch for arch in ARCHS if not missing(version, arch)] for version in known}
    incomplete = [
        f"{arch} is not complete under Triton {version}: {dict(Counter(x.kernel for x in missing(version, arch)))}"
        for version, arch in product(versions, archs)
        if missing(version, arch)
    ]
    if incomplete:
        sys.exit("\n".join([*incomplete, "the kernels changed; run make compile-matrix"]))
    compiled = {version: complete for version, complete in compiled.items() if complete}
    entries = []
    for arch in ARCHS:
        complete = [version for version in compiled if arch in compiled[version]]
        for variant, call in variants[arch].items() if complete else ():
            entry = {"key": variant.key, "arch": arch, "kernel": variant.kernel, "call": call}
            entry |= {name: getattr(variant, name) for name in ("num_warps", "num_stages", "max_registers")}
            entries.append(entry | {"results": {version: results[variant.key, version] for version in complete}})
    lines = ",\n".join(json.dumps(entry) for entry in entries)
    head = json.dumps({"compiled": compiled, "columns": COLUMNS})
    MATRIX.parent.mkdir(parents=True, exist_ok=True)
    MATRIX.write_text(f'{head[:-1]}, "variants": [\n{lines}\n]}}\n')
    return summarize(entries, compiled)


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def summarize(entries: list[dict[str, Any]], compiled: dict[str, list[Arch]]) -> int:
    """Print a line for each version and arch; the number of faults."""
    faults = 0
    names = ("variants", "faults", "spill", "shared", "slow", "seconds")
    print("Triton  arch    " + "".join(f"{name:>9}" for name in names))
    for version, archs in compiled.items():
        for arch in archs:
            rows = [dict(zip(COLUMNS, x["results"][version], strict=True)) for x in entries if x["arch"] == arch]
            faulty = sum(row["fault"] is not None for row in rows)
            faults += faulty
            spilling, slow = sum(row["spills"] > 0 for row in rows), sum(row["seconds"] > SLOW for row in rows)
            shared, seconds = max(row["shared"] for row in rows), max(row["seconds"] for row in rows)
            print(f"{version:8}{arch:8}{len(rows):9}{faulty:9}{spilling:9}{shared:9}{slow:9}{seconds:9.1f}")
    return faults


def write_launches(path: Path) -> None:
    """One line a launch: its call, the key of its variant, its grid and its arguments, in the order of the launches."""
    with path.open("w") as file:
        for arch, configuration in product(ARCHS, configurations()):
            launches = record(configuration, arch)
            places: dict[int, int] = {}  # of memory, in the order in which launches name it
            for launch, variant in zip(launches, variants_of(launches, arch), strict=True):
                arguments = [_argument(value, places) for value in launch.args]
                line = [arch, label(configuration), variant.key, launch.grid, arguments]
                file.write(json.dumps(line) + "\n")


def _argument(value: Any, places: dict[int, int]) -> Any:
    """A number as it is; a tensor by type, shape, strides and where it lies."""
    if not isinstance(value, torch.Tensor):
        return value
    place = places.setdefault(value.untyped_storage()._cdata, len(places))
    return [str(value.dtype), value.shape, value.stride(), place, value.storage_offset()]


if __name__ == "__main__":
    main()
