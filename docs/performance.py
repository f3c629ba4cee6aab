"""Write docs/performance.md from the measurements in docs/results: ``python docs/performance.py``.

    h200-verify-*.json                   from benchmarks/verify_gpu.py
    h200-additive.json, h200-delta.json  from benchmarks/speed.py
    h200-block-diagonal.json             from benchmarks/block_diagonal.py
    h200-chunk-against-recurrent.json    from benchmarks/chunk_against_recurrent.py; docs/figures.py draws it

No figure of the page is typed by hand; the words around them are in ``PAGE``. A file that is not there leaves its
section with a line that says so.
"""

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from statemix.benchmarks.against_float64 import LIMIT_UNDER_EQUAL_KEYS, LIMITS
from statemix.benchmarks.bench import DTYPES
from statemix.benchmarks.ops import OPS, SHAPES, Sizes

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

Tile sizes come from a short table keyed by head sizes and kind of GPU. Nothing is tuned behind your back, so a first
call compiles once, and packed documents of any length compile nothing more. To try other tiles on a GPU of yours, for
heads of one size and for all recurrences or those that `--op` names (a block counts as a head):

```text
statemix bench --tune --key-dim 64 --value-dim 64 --out tuned.json
statemix bench --tuned tuned.json --key-dim 64
statemix train RECIPE --tuned tuned.json
```

Every candidate is held against float64 in a process of its own before its launches are timed. The file is JSON and can
be kept; in Python `with statemix.kernels.tuned("tuned.json"):` goes around training or generation, backward passes
included.

## Speed of linear attention and gates

{additive}

## Speed of the delta family

{delta}

## Block-diagonal, dense, and separate heads

{blocks}

## The chunk form against the recurrent kernel

{forms}

## Errors of linear attention and gates

{additive_errors}

## Errors of the delta family

{delta_errors}

## Measure again

On a machine with a GPU, in a clone of the repository:

```text
pip install --editable .
python benchmarks/verify_gpu.py --family additive --out docs/results/h200-verify-additive.json
python benchmarks/verify_gpu.py --family delta --out docs/results/h200-verify-delta.json
python benchmarks/speed.py --family additive --peer --out docs/results/h200-additive.json
python benchmarks/speed.py --family delta --peer --out docs/results/h200-delta.json
python benchmarks/block_diagonal.py --out docs/results/h200-block-diagonal.json
python benchmarks/chunk_against_recurrent.py --out docs/results/h200-chunk-against-recurrent.json
python docs/figures.py
python docs/performance.py
```

`--help` of each says what it does and how long it takes. The last line writes this page.
"""

WHAT_ERRORS_ARE = """\
A configuration is a recurrence with head sizes from 4 to 512 and a dtype. Its cases are
lengths from 1 to 1000, packed documents, empty ones and such that begin inside a chunk, weak and strong gates, strides,
with and without states. The error of a tensor is the norm of its difference from float64 on the same rounded inputs,
relative to the norm. Every case runs twice, with equal bits, in memory full of NaN."""

WHAT_EQUAL_KEYS_DO = f"""\
Where every key of a sequence is the same, outputs and states keep the limits above. Gradients in 16 bits do not:
pseudo-values then alternate in sign and cancel in what they are summed into, and each is kept in 16 bits. They are
held to {LIMIT_UNDER_EQUAL_KEYS} there, and the largest error of a gradient in the table is such a one: of a scalar gate
where beta is 2. In float32 nothing of this shows."""

WHAT_BLOCKS_ARE = """\
A block-diagonal Householder cuts the K channels of a head into blocks that share its value; their read-outs are summed.
*Of dense* is the time relative to one dense Householder of the same K, *of heads* relative to as many separate heads as
there are blocks, each with its share of K and a value of its own; both are of the launches alone, in brackets, where
those were timed. All have states of the same size. A line without a figure has no counterpart: no dense kernel
holds so many channels."""

WHAT_FORMS_ARE = """\
Both read the same tensors and write the same output. The recurrent kernel takes one token after another; the chunk form
turns a chunk into matrix products and runs along the sequence in parallel. Every call has {tokens} tokens, in sequences
of T, and heads that together are {width} channels wide. *Times* is the time of the recurrent kernel over that of the
chunk form."""

NOTHING = "No measurement has been committed yet."

# Times as fast as the peer: forward, and forward and backward, for the first two shapes.
GOALS = {
    SHAPES[0]: {"deltanet": (2.8, 2.7), "gated_deltanet": (2.8, 2.7), "kda": (2.0, 2.7)},
    SHAPES[1]: {"deltanet": (1.5, 1.9), "gated_deltanet": (1.5, 1.9), "kda": (1.5, 1.9)},
}


def page(results: Path) -> str:
    """The page for the JSON files of a folder."""
    verified = [r for file in sorted(results.glob("h200-verify-*.json")) for r in _read(file)]
    by_family = {family: [r for r in verified if OPS[r["op"]].kernels == family] for family in ("additive", "delta")}
    additive, delta, in_blocks, forms = (
        _read(results / f"h200-{name}.json")
        for name in ("additive", "delta", "block-diagonal", "chunk-against-recurrent")
    )
    return PAGE.format(
        additive=speed(additive) if additive else NOTHING,
        delta=f"{goals(delta)}\n\n{speed(delta)}" if delta else NOTHING,
        blocks=block_diagonal(in_blocks) if in_blocks else NOTHING,
        forms=chunk_against_recurrent(forms) if forms else NOTHING,
        additive_errors=errors(by_family["additive"]) if by_family["additive"] else NOTHING,
        delta_errors=f"{errors(by_family['delta'])}\n\n{WHAT_EQUAL_KEYS_DO}" if by_family["delta"] else NOTHING,
    )


def goals(records: Sequence[Record]) -> str:
    """What the kernels were to reach beside what they reach."""
    rows, reached = [], list[bool]()
    for sizes, ops in GOALS.items():
        here = [r for r in records if _sizes(r) == sizes and not r["recompute"]]
        for op, pair in ops.items():
            mine, theirs = (
                next((r for r in here if r["op"] == op and (r["backend"] == PEER) == is_peer), {})
                for is_peer in (False, True)
            )
            row = [str(sizes), OPS[op].label]
            for key, goal in zip(("forward_ms", "forward_backward_ms"), pair, strict=True):
                times = theirs[key] / mine[key] if mine.get(key) and theirs.get(key) else None
                row += [_number(times, 2), f"{goal}"]
                reached.append(times is not None and times >= goal)
            rows.append(row)
    titles = ["sizes", "recurrence", "forward, times", "wanted", "forward and backward, times", "wanted"]
    summary = f"Wanted beside {PEER}, and reached in {sum(reached)} of {len(reached)} places:"
    return f"{summary}\n\n{_table(titles, rows)}"


def block_diagonal(records: Sequence[Record]) -> str:
    """A table of all recurrences: the cost of blocks beside dense heads, and beside separate ones."""
    found = {(r["op"].removesuffix("_blocks"), r["num_heads"], r["key_dim"], r["blocks"]): r for r in records}
    rows = []
    for (op, heads, key_dim, blocks), r in found.items():
        layout = f"{heads} heads, K {key_dim}" + (f", {blocks} blocks of {key_dim // blocks}" if blocks > 1 else "")
        dense = found.get((op, heads, key_dim, 1), {}) if blocks > 1 else {}
        apart = found.get((op, heads * blocks, key_dim // blocks, 1), {}) if blocks > 1 else {}
        row = [OPS[op].label, layout]
        for key in ("forward_ms", "forward_backward_ms"):
            row.append(_milliseconds(r, key) or "failed")
            mine, theirs = _of_launches(r, key), [_of_launches(other, key) for other in (dense, apart)]
            row += [_number(mine / other if mine and other else None, 2) for other in theirs]
        rows.append([*row, _number(r["peak_mb"], 0)])
    beside = ["of dense", "of heads"]
    titles = ["recurrence", "layout", "forward", *beside, "forward and backward", *beside, "MB"]
    r = records[0]
    sizes = f"B{r['batch']} T{r['seq_len']} V{r['value_dim']}"
    about = f"Medians in milliseconds at {sizes}, {r['dtype']}; {_origin(records)}."
    return "\n\n".join([WHAT_BLOCKS_ARE, about, _table(titles, rows)])


def chunk_against_recurrent(records: Sequence[Record]) -> str:
    """The picture, and a table for each recurrence."""
    times = {(r["op"], r["seq_len"], r["key_dim"], r["form"]): r["forward_ms"] for r in records}
    first = records[0]
    what = WHAT_FORMS_ARE.format(
        tokens=first["batch"] * first["seq_len"], width=first["num_value_heads"] * first["key_dim"]
    )
    picture = "![The chunk form over the recurrent kernel](figures/chunk-against-recurrent.png)"
    parts = [what, picture, f"Forward only, medians in milliseconds, {first['dtype']}; {_origin(records)}."]
    dims = sorted({r["key_dim"] for r in records})
    for op in dict.fromkeys(r["op"] for r in records):
        rows = []
        for seq_len in sorted({r["seq_len"] for r in records if r["op"] == op}):
            row = [str(seq_len)]
            for dim in dims:
                chunk, recurrent = (times.get((op, seq_len, dim, form)) for form in ("chunk", "recurrent"))
                ratio = recurrent / chunk if chunk and recurrent else None
                row += [_number(chunk, 3), _number(recurrent, 3), _number(ratio, 1)]
            rows.append(row)
        titles = [title for dim in dims for title in (f"D{dim} chunk", "recurrent", "times")]
        parts += [f"### {OPS[op].label}", _table(["T", *titles], rows)]
    return "\n\n".join(parts)


def speed(records: Sequence[Record]) -> str:
    """A table for each shape, the peer's time beside ours."""
    ours = [r for r in records if r["backend"] != PEER]
    parts = [
        f"Medians in milliseconds, {_origin(ours)}. In brackets the launches alone, replayed from a CUDA graph; where "
        "Python takes longer to start the kernels than they run, the figure before is that of Python. A large copy "
        f"moves {_bandwidths(ours)}. *Times* is the time of {PEER} over ours. The first call is that of a new process "
        "with an empty cache of compiled kernels: forward, and forward and backward."
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
            row += [_milliseconds(r, key), _number(r.get(floor), 3), _number(peer, 3), _number(ratio, 2)]
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
    names = "; ".join(sorted({OPS[r["op"]].label for r in records}))
    return "\n\n".join([f"{names}. {_origin(records)}. {WHAT_ERRORS_ARE}", _table(titles, rows)])


def _largest(records: Iterable[Record], *, is_gradient: bool) -> float:
    found = [pair for r in records for pair in r["errors"].items()]
    return max((float(error) for name, (error, _) in found if name.startswith("d ") == is_gradient), default=0.0)


def _origin(records: Sequence[Record]) -> str:
    """Device, versions, where records have them, and dates."""
    origin = list(dict.fromkeys(r["gpu"] for r in records))
    for package in ("torch", "triton", "statemix"):
        if versions := sorted({r["versions"][package] for r in records if package in r["versions"]}):
            origin.append(f"{package} {' and '.join(versions)}")
    return ", ".join([*origin, " and ".join(sorted({r["date"] for r in records}))])


def _bandwidths(records: Sequence[Record]) -> str:
    return " or ".join(f"{gb:.0f} GB/s" for gb in dict.fromkeys(r["copy_gb_s"] for r in records if r["copy_gb_s"]))


def _peer_note(record: Record) -> str:
    return f"{PEER} {record['versions'].get(PEER, '?')} on {record['gpu']}, {record['date']}: {record['note']}."


def _sizes(record: Record) -> Sizes:
    return Sizes(**{name: record[name] for name in Sizes.__dataclass_fields__})


def _milliseconds(record: Record, key: str) -> str:
    """As a call takes them, and in brackets its launches alone."""
    graph = _number(record.get(f"graph_{key}"), 3)
    return _number(record[key], 3) + (f" ({graph})" if graph else "")


def _of_launches(record: Record, key: str) -> float | None:
    """Of the launches alone where they were timed: how fast Python is differs from call to call and from day to day."""
    milliseconds: float | None = record.get(f"graph_{key}", record.get(key))
    return milliseconds


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = [titles, ["---", *["---:"] * (len(titles) - 1)]]
    return "\n".join(f"| {' | '.join(row)} |" for row in [*head, *rows])


def _read(file: Path) -> list[Record]:
    """The records of a file, none where there is none."""
    records: list[Record] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else []
    return records


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", type=Path, default=DOCS / "performance.md", help="default: %(default)s")
    parser.parse_args().target.write_text(page(DOCS / "results"), encoding="utf-8")
