"""benchmarks/verify_gpu.py with its configurations, on the CPU: what is listed, and that nothing wrong gets past it."""

import functools
import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from statemix import ScanResult, scan
from statemix.benchmarks.bench import DTYPES
from statemix.benchmarks.gpu_configurations import CASES, DELTA_CASES, EVERY_TILE, Configuration, configurations
from statemix.benchmarks.ops import OPS, names_of
from statemix.kernels.launch_config import ARCHS, AdditiveConfig, DeltaConfig, Tiles, additive_config, delta_config

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
ADDITIVE, DELTA = names_of("additive"), names_of("delta", timed_only=False)
HERE = ["--device", "cpu", "--backend", "torch"]
SMALLEST = ["--full", "--ops", "gla", "--only", "K4", "float32"]


@pytest.fixture
def script(load_script: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    module = load_script("verify_gpu")
    monkeypatch.setattr("statemix.benchmarks.measured_on.source_digest", lambda: "0123456789abcdef")
    monkeypatch.setattr(module, "source_digest", lambda: "0123456789abcdef")
    return module


SIZES = list(product(range(4, 513, 4), range(4, 513, 12)))


def padded(size: int) -> int:
    return max(16, 1 << (size - 1).bit_length())


def tile_classes(config: AdditiveConfig | DeltaConfig, key_dim: int, value_dim: int) -> set[tuple[object, ...]]:
    """What decides the tiles: the row of the table and the widths that they are padded, or fitted, to."""
    by_value = {
        name: tiles for name, tiles in vars(config).items() if isinstance(tiles, Tiles) and name != "intra_chunk"
    }
    blocks = sorted({tiles.block for tiles in by_value.values()})
    found: set[tuple[object, ...]] = {(config, padded(key_dim), *(min(block, padded(value_dim)) for block in blocks))}
    if isinstance(config, DeltaConfig):  # products with the inverse; gradients of pairs, without a gate and with one
        fitted = config.intra_chunk.fitted_to
        found |= {("intra_chunk", config, fitted(key_dim))}
        found |= {("pairs", config, fitted(value_dim), fitted(max(key_dim, value_dim)))}
    return found


def classes_of(row_of: Callable[[int, int], Any], sizes: Iterable[tuple[int, int]]) -> set[tuple[object, ...]]:
    return {one for dims in sizes for one in tile_classes(row_of(*dims), *dims)}


@pytest.mark.parametrize(
    ("depth", "dtype"),  # in float16 a third of the usual ones: its tiles are those of bfloat16
    [("usual", "bfloat16"), ("usual", "float32"), ("full", "bfloat16"), ("full", "float32"), ("full", "float16")],
)
def test_every_configuration_that_can_be_chosen_is_listed(script: Any, depth: str, dtype: str) -> None:
    for op in ADDITIVE:
        listed = [c for c in configurations(ADDITIVE, depth=depth) if c.op == op and c.dtype == dtype]
        for arch in ARCHS:
            row_of = functools.partial(additive_config, arch, dtype=DTYPES[dtype])
            covered = classes_of(row_of, [(c.key_dim, c.value_dim) for c in listed])
            assert classes_of(row_of, SIZES) <= covered, op


@pytest.mark.parametrize(
    ("depth", "dtype"), [("usual", "bfloat16"), ("full", "bfloat16"), ("full", "float32"), ("full", "float16")]
)
def test_three_recurrences_of_the_delta_family_meet_every_tile(script: Any, depth: str, dtype: str) -> None:
    for op in EVERY_TILE:
        listed = [c for c in configurations(DELTA, depth=depth) if c.op == op and c.dtype == dtype]
        for arch in ARCHS:
            row_of = functools.partial(delta_config, arch, dtype=DTYPES[dtype])
            covered = classes_of(row_of, [(c.key_dim, c.value_dim) for c in listed])
            assert classes_of(row_of, SIZES) <= covered, op


def test_every_combination_of_the_delta_family_is_listed_and_fits_the_time(script: Any) -> None:
    for depth, most in (("quick", 60), ("usual", 160), ("full", 1000)):
        listed = configurations(DELTA, depth=depth)
        assert {c.op for c in listed} == set(DELTA) and len(set(listed)) == len(listed) <= most
        assert {name for c in listed for name in c.sets} == set(DELTA_CASES) == set(CASES)
        assert all(c.key_dim % c.recurrence.blocks == 0 for c in listed)
    usual = configurations(DELTA, depth="usual")
    for op in DELTA:
        assert {"bfloat16", "float32"} <= {c.dtype for c in usual if c.op == op}
    by_block = {c.key_dim // c.recurrence.blocks for c in usual if c.recurrence.blocks > 1}
    assert by_block >= {64, 128} and max(c.key_dim for c in usual) == 1024


def test_cases_of_the_delta_family_are_short_and_hold_equal_keys(script: Any) -> None:
    cases = [case for found in DELTA_CASES.values() for case in found]
    assert [case.name for case in cases if case.seq_len > 900] == ["t1000 segments"]
    assert {case.gates for case in cases} == {"ordinary", "zero", "mixed", "strong", "resets"}
    assert {case.rates for case in cases if case.has_equal_keys} == {"one", "two"}
    assert any(start % 16 for case in cases for start in case.offsets), "documents that begin inside a chunk"
    assert any(dict(case.options).get("recompute") for case in cases)
    assert any(case.is_strided for case in cases) and any(case.has_narrow_gates for case in cases)


@pytest.mark.parametrize("name", ["rwkv7", "kda_product_projected_blocks"])
def test_a_combination_of_the_delta_family_is_verified(
    script: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    short = {key: found[:1] for key, found in DELTA_CASES.items() if key not in ("long", "batch")}
    equal = tuple(replace(case, seq_len=70) for case in DELTA_CASES["batch"] if case.has_equal_keys)
    monkeypatch.setattr("statemix.benchmarks.gpu_configurations.DELTA_CASES", {**short, "batch": equal, "long": equal})
    out = tmp_path / "v.json"
    assert script.main(["--ops", name, *HERE, "--out", str(out), "--only", "float32"]) == 0
    for record in json.loads(out.read_text()):
        assert record["count"] == OPS[name].count and record["blocks"] == OPS[name].blocks
        assert record["errors"].keys() >= {"output", "d channel_decay", "d direction"}
    assert f"right  {name} K" in capsys.readouterr().out


def test_widths_are_filled_exactly_and_in_part_and_every_case_meets_every_recurrence(script: Any) -> None:
    for depth in ("usual", "full"):
        listed = configurations(ADDITIVE, depth=depth)
        for op in ADDITIVE:
            mine = [c for c in listed if c.op == op]
            assert {(padded(c.key_dim), padded(c.key_dim) == c.key_dim) for c in mine} == {
                (width, exact) for width in (16, 32, 64, 128, 256, 512) for exact in (True, False)
            }
            assert {name for c in mine for name in c.sets} == set(CASES)
    assert len(configurations(ADDITIVE, depth="quick")) < len(configurations(ADDITIVE, depth="usual")) / 3


def test_cases_hold_what_has_gone_wrong_elsewhere(script: Any) -> None:
    cases = [case for found in CASES.values() for case in found]
    assert {case.seq_len for case in cases} >= {1, 17, 64, 65, 200, 1000}
    assert {case.gates for case in cases} == {"ordinary", "zero", "mixed", "strong", "resets"}
    packed = [case.offsets for case in cases if case.offsets]
    assert any(a == b for offsets in packed for a, b in zip(offsets, offsets[1:], strict=False)), "empty documents"
    assert any(start % 16 for offsets in packed for start in offsets), "documents that begin inside a chunk"
    assert any(case.offsets and case.offsets[-1] < case.seq_len for case in cases), "rows of no document"
    assert {case.num_value_heads // case.num_heads for case in cases} == {1, 2}
    assert any(not case.has_state for case in cases) and any(case.is_strided for case in cases)


def test_a_run_prints_a_line_and_writes_a_record_for_each(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "v.json"
    assert script.main([*SMALLEST, *HERE, "--out", str(out)]) == 0
    [record] = json.loads(out.read_text())
    assert record["status"] == "right" and record["op"] == "gla" and record["gpu"] == "none"
    assert record["num_cases"] == sum(len(cases) for cases in CASES.values())
    assert record["errors"].keys() >= {"output", "final_state", "d q", "d k", "d v", "d channel_decay"}
    assert all(0 < error < 1e-4 and isinstance(case, str) for error, case in record["errors"].values())
    assert record["versions"]["torch"] == torch.__version__ and len(record["source"]) == 16
    printed = capsys.readouterr().out
    assert "right  gla K4 V12 float32" in printed and "1 right, 0 not, 0 not run" in printed
    assert script.main([*SMALLEST, *HERE, "--out", str(out), "--resume"]) == 0
    assert "0 configurations, 1 right in an earlier run" in capsys.readouterr().out
    assert json.loads(out.read_text()) == [record]
    monkeypatch.setattr(script, "source_digest", lambda: "another")
    assert script.earlier_records(out) == []


def test_a_wrong_or_crashed_configuration_and_a_lack_of_time_change_the_exit_code(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def off(q: torch.Tensor, *args: Any, **options: Any) -> ScanResult:
        result = scan(q, *args, **options)
        return result if q.dtype == torch.float64 else ScanResult(result.output * 1.0001, result.final_state)

    monkeypatch.setattr("statemix.benchmarks.gpu_configurations.CASES", {"batch": (CASES["batch"][0],)})
    with monkeypatch.context() as patch:
        patch.setattr("statemix.benchmarks.against_float64.scan", off)
        assert script.main([*SMALLEST, *HERE]) == 1
    printed = capsys.readouterr().out
    assert "wrong  gla K4 V12 float32" in printed and "t1: output: error 1.0e-04 over 1e-05" in printed
    assert script.main([*SMALLEST, "--device", "cpu", "--backend", "triton"]) == 1  # where Triton cannot run
    assert "failed gla K4 V12 float32" in capsys.readouterr().out
    assert script.main([*SMALLEST, *HERE, "--minutes", "0"]) == 2
    with pytest.raises(SystemExit, match="only: expected words of a line"):
        script.main([*HERE, "--only", "K5"])


def test_an_error_far_above_its_kind_is_reported_though_below_the_limit(script: Any) -> None:
    one = Configuration("gla", 64, 64, "bfloat16", ("batch",))
    errors = [3.4e-3, 3.3e-3, 3.5e-3, 3.4e-3, 4.7e-3]
    verdicts = [
        script.Verdict(
            replace(one, value_dim=value_dim), "right", (), {"t65": script.Finding({"d q": e}, {"d q": 10**5}, ())}, 1.0
        )
        for value_dim, e in zip((64, 65, 66, 67, 68), errors, strict=True)
    ]
    [found] = script.outliers(verdicts)
    tiny = [
        replace(v, findings={"t65": script.Finding({"d q": n * 1e-5}, {"d q": 10**5}, ())})
        for n, v in enumerate(verdicts)
    ]
    assert list(script.outliers(tiny)) == []  # of sums in float32, not of a product
    assert "V68" in found and "4.70e-03, typically 3.40e-03" in found
    few = [
        replace(v, findings={"t65": script.Finding({"d q": 1.0 + n}, {"d q": 64}, ())}) for n, v in enumerate(verdicts)
    ]
    assert list(script.outliers(few)) == []


@pytest.mark.slow
def test_the_script_runs_in_processes_of_its_own(tmp_path: Path) -> None:
    command = [sys.executable, "-P", str(BENCHMARKS / "verify_gpu.py"), *SMALLEST, *HERE, "--workers", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 right, 0 not, 0 not run" in done.stdout
