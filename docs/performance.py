"""Write docs/performance.md from the measurements in docs/results: ``python docs/performance.py``.

    results/h200-verify-*.json    from benchmarks/verify_gpu.py
    results/h200-*.json           the others, from benchmarks/speed.py

No figure of the page is typed by hand; the words around them are in ``PAGE``.
"""

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from statemix.against_float64 import LIMITS
from statemix.bench import DTYPES
from statemix.ops import OPS, Sizes

DOCS = Path(__file__).parent
PEER = "flash-linear-attention"
Record = dict[str, Any]

PAGE = """\
# Performance

<!-- Written by docs/performance.py from docs/results; change those. -->

On a GPU the recurrences run as Triton kernels without being asked; on a CPU as torch operators. This page has what was
measured, and how to measure it on another machine.

## Time it here

`statemix bench` times recurrences by name, for any sizes, or those of a recipe, with the inputs and in the way of the
tables below:

<!-- tested with: --seq-len 64 -->
```console
$ statemix bench --op gla mamba2
...
recurrence sizes runs forward floor both floor MB
GLA ...
scalar gate ...
```

`both` is forward and backward. `floor` is the time a GPU needs to move the bytes that no implementation can avoid:
inputs read and output written once, in backward inputs and upstream gradient read and gradients written, at the
bandwidth of a large copy. `MB` is what a forward and backward pass allocates above its inputs. `statemix bench
quickstart` takes layers, batch and length from a recipe.

## Tiles for another GPU

Tile sizes come from a short table keyed by head sizes and device family. Nothing is tuned behind your back, so a first
call compiles once, and packed documents of any length compile nothing more. To try other tiles on a GPU of yours:

```text
statemix bench --tune --key-dim 64 --value-dim 64 --out tuned.json
statemix bench --tuned tuned.json --key-dim 64
statemix train RECIPE --tuned tuned.json
```

Every candidate is held against float64 in a process of its own before it is timed. The file is JSON and can be kept; in
Python `with statemix.kernels.tuned("tuned.json"):` goes around training or generation, backward passes included.

## Speed

{speed}

## Errors

{errors}

## Measure again

On a machine with a GPU, in a clone of the repository:

```text
pip install --editable .
python benchmarks/verify_gpu.py --out docs/results/h200-verify-additive.json
python benchmarks/speed.py --peer --out docs/results/h200-additive.json
python docs/performance.py
```

`--help` of each says what it does and how long it takes. The last line writes this page.
"""

WHAT_ERRORS_ARE = """\
A configuration is a recurrence with head sizes from 4 to 512 and a dtype. Its cases are
lengths from 1 to 1000, packed documents, empty ones and such that begin inside a chunk, weak and strong gates, strides,
with and without states. The error of a tensor is the norm of its difference from float64 on the same rounded inputs,
relative to the norm. Every case runs twice, with equal bits, in memory full of NaN."""

NOTHING = "No measurement has been committed yet."


def page(results: Path) -> str:
    """The page for the JSON files of a folder."""
    verified = [r for file in sorted(results.glob("h200-verify-*.json")) for r in _read(file)]
    files = sorted(set(results.glob("h200-*.json")) - set(results.glob("h200-verify-*.json")))
    timed = [r for file in files for r in _read(file)]
    return PAGE.format(speed=speed(timed) if timed else NOTHING, errors=errors(verified) if verified else NOTHING)


def speed(records: Sequence[Record]) -> str:
    """A table for each shape, the peer's time beside ours."""
    ours = [r for r in records if r["backend"] != PEER]
    parts = [
        f"Medians in milliseconds, {_told(ours)}. A large copy moves {_bandwidths(ours)}. *Times* is the time of "
        f"{PEER} over ours. The first call is that of a new process with an empty cache of compiled kernels: forward, "
        "and forward and backward."
    ]
    for sizes in dict.fromkeys(_sizes(r) for r in ours):
        parts += [f"### {sizes}", _speed_table([r for r in records if _sizes(r) == sizes])]
    for note in dict.fromkeys(_peer_note(r) for r in records if r["backend"] == PEER):
        parts.append(note)
    return "\n\n".join(parts)


def _speed_table(records: Sequence[Record]) -> str:
    peers = {r["op"]: r for r in records if r["backend"] == PEER}
    rows = []
    for r in (r for r in records if r["backend"] != PEER):
        label = OPS[r["op"]].label + (", recomputed" if r["recompute"] else "")
        if r["forward_ms"] is None:
            rows.append([label, "failed", *[""] * 9])
            continue
        row = [label]
        for key, floor in (("forward_ms", "floor_ms"), ("forward_backward_ms", "floor_forward_backward_ms")):
            peer = peers.get(r["op"], {}).get(key)
            ratio = None if peer is None else peer / r[key]
            row += [_number(r[key], 3), _number(r.get(floor), 3), _number(peer, 3), _number(ratio, 2)]
        first = [_number(r.get(key), 1) for key in ("first_call_s", "first_forward_backward_call_s")]
        rows.append([*row, _number(r["peak_mb"], 0), "" if first == ["", ""] else ", ".join(first)])
    titles = ["forward", "floor", PEER, "times", "forward and backward", "floor", PEER, "times", "MB", "first call, s"]
    return _table(["recurrence", *titles], rows)


def errors(records: Sequence[Record]) -> str:
    """Configurations, cases and the largest errors by dtype."""
    rows = []
    for dtype in DTYPES:
        found = [r for r in records if r["dtype"] == dtype]
        wrong = [r for r in found if r["status"] != "right"]
        if found:
            largest = [f"{_largest(found, is_gradient=gradient):.1e}" for gradient in (False, True)]
            limits = [f"{limit:.0e}" for limit in LIMITS[DTYPES[dtype]]]
            cases = sum(r["num_cases"] for r in found)
            columns = [largest[0], limits[0], largest[1], limits[1]]
            rows.append([dtype, str(len(found)), str(cases), str(len(wrong)), *columns])
    titles = ["dtype", "configurations", "cases", "not right", "largest error", "limit", "of a gradient", "limit"]
    names = ", ".join(OPS[name].label for name in dict.fromkeys(r["op"] for r in records))
    return "\n\n".join([f"{names}; {_told(records)}. {WHAT_ERRORS_ARE}", _table(titles, rows)])


def _largest(records: Iterable[Record], *, is_gradient: bool) -> float:
    found = [pair for r in records for pair in r["errors"].items()]
    return max((float(error) for name, (error, _) in found if name.startswith("d ") == is_gradient), default=0.0)


def _told(records: Sequence[Record]) -> str:
    """Device, versions and dates."""
    said = []
    for gpu in dict.fromkeys(r["gpu"] for r in records):
        said.append(gpu)
    for package in ("torch", "triton", "statemix"):
        said.append(f"{package} {' and '.join(sorted({r['versions'].get(package, '?') for r in records}))}")
    return ", ".join([*said, " and ".join(sorted({r["date"] for r in records}))])


def _bandwidths(records: Sequence[Record]) -> str:
    return " or ".join(f"{gb:.0f} GB/s" for gb in dict.fromkeys(r["copy_gb_s"] for r in records if r["copy_gb_s"]))


def _peer_note(record: Record) -> str:
    return f"{PEER} {record['versions'].get(PEER, '?')} on {record['gpu']}, {record['date']}: {record['note']}."


def _sizes(record: Record) -> Sizes:
    return Sizes(**{name: record[name] for name in Sizes.__dataclass_fields__})


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = [titles, ["---", *["---:"] * (len(titles) - 1)]]
    return "\n".join(f"| {' | '.join(row)} |" for row in [*head, *rows])


def _read(file: Path) -> list[Record]:
    records: list[Record] = json.loads(file.read_text(encoding="utf-8"))
    return records


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS / "performance.md"
    target.write_text(page(DOCS / "results"), encoding="utf-8")
