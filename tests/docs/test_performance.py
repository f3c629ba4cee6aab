"""docs/performance.md is what its script makes of the measurements in docs/results."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("performance_page", DOCS / "performance.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_script_makes_of_the_results(script: Any) -> None:
    page = script.page(DOCS / "results")
    assert (DOCS / "performance.md").read_text(encoding="utf-8") == page, "run docs/performance.py"


TOLD = {
    "gpu": "NVIDIA H200",
    "versions": {"torch": "2.11.0", "triton": "3.6.0", "statemix": "0.1.0"},
    "date": "2026-12-01",
}
SIZES = {"batch": 8, "seq_len": 2048, "num_heads": 16, "num_value_heads": 16, "key_dim": 128, "value_dim": 128}


def timed(op: str, **changes: Any) -> dict[str, Any]:
    record = {
        "op": op, **SIZES, "dtype": "bfloat16", "backend": "triton", "recompute": False, "copy_gb_s": 4244.0,
        "forward_ms": 0.2, "forward_backward_ms": 1.0, "peak_mb": 640.2, "first_call_s": 6.1,
        "first_forward_backward_call_s": 14.9, "floor_ms": 0.095, "floor_forward_backward_ms": 0.27, **TOLD,
    }  # fmt: skip
    return record | changes


def verified(**changes: Any) -> dict[str, Any]:
    errors = {"output": [2.5e-3, "t65"], "d q": [3.1e-3, "t1"]}
    record = {"op": "gla", "dtype": "bfloat16", "status": "right", "num_cases": 9, "errors": errors, **TOLD}
    return record | changes


def test_a_table_has_our_time_the_floor_the_peer_and_their_ratio(script: Any, tmp_path: Path) -> None:
    peer = timed("gla", backend=script.PEER, forward_ms=0.706, forward_backward_ms=2.98, date="2026-11", note="N")
    peer["versions"] = {script.PEER: "0.6.0"}
    failed = timed("retnet", forward_ms=None, forward_backward_ms=None, failure="crashed")
    again = timed("gla", recompute=True, first_call_s=None, first_forward_backward_call_s=None)
    (tmp_path / "h200-additive.json").write_text(json.dumps([timed("gla"), again, failed, peer]))
    page = script.page(tmp_path)
    assert "### B8 T2048 H16 D128" in page
    assert "| GLA | 0.200 | 0.095 | 0.706 | 3.53 | 1.000 | 0.270 | 2.980 | 2.98 | 640 | 6.1, 14.9 |" in page
    assert "| GLA, recomputed | 0.200 |" in page and "| RetNet | failed |" in page
    assert "NVIDIA H200, torch 2.11.0, triton 3.6.0, statemix 0.1.0, 2026-12-01" in page and "4244 GB/s" in page
    assert "flash-linear-attention 0.6.0 on NVIDIA H200, 2026-11: N." in page
    widths = {line.count("|") for line in page.splitlines() if line.startswith("|")}
    assert widths == {12}


def test_what_was_wanted_stands_beside_what_is_reached(script: Any, tmp_path: Path) -> None:
    peer = timed("kda", backend=script.PEER, forward_ms=0.923, forward_backward_ms=4.85, date="2026-11", note="N")
    delta = [timed("kda", forward_ms=0.5, forward_backward_ms=1.5), timed("kda_blocks", blocks=2, count=1), peer]
    (tmp_path / "h200-delta.json").write_text(json.dumps(delta))
    page = script.page(tmp_path)
    assert "reached in 1 of 12 places" in page
    assert "| B8 T2048 H16 D128 | KDA | 1.85 | 2.0 | 3.23 | 2.7 |" in page
    assert "| B1 T32768 H16 D128 | DeltaNet |  | 1.5 |  | 1.9 |" in page
    assert "| KDA, 2 blocks | 0.200 | 0.095 |  |  | 1.000 |" in page


def test_errors_are_the_largest_of_each_dtype(script: Any, tmp_path: Path) -> None:
    records = [
        verified(),
        verified(errors={"output": [3.9e-3, "t17"], "d k": [2.0e-3, "t17"]}),
        verified(dtype="float32", status="wrong", errors={"output": ["inf", "t1"]}),
    ]
    (tmp_path / "h200-verify-additive.json").write_text(json.dumps(records))
    page = script.page(tmp_path)
    assert "| bfloat16 | 2 | 18 | 0 | 3.9e-03 | 8e-03 | 3.1e-03 | 2e-02 |" in page
    assert "| float32 | 1 | 9 | 1 | inf | 1e-05 | 0.0e+00 | 1e-04 |" in page
    assert script.NOTHING in page  # no times
    unnamed = verified(op="rwkv7", num_cases=11, versions={"torch": "2.11.0", "triton": "3.6.0"})
    (tmp_path / "h200-verify-delta.json").write_text(json.dumps([unnamed]))
    page = script.page(tmp_path)
    assert (
        "RWKV-7. NVIDIA H200, torch 2.11.0, triton 3.6.0, 2026-12-01." in page
        and "| bfloat16 | 1 | 11 | 0 | 2.5e-03 |" in page
    )
    assert "| bfloat16 | 2 | 18 | 0 |" in page  # families apart


def test_blocks_are_set_beside_dense_heads_and_separate_ones(script: Any, tmp_path: Path) -> None:
    layouts = (
        ("deltanet", 8, 256, 1, 2.0),
        ("deltanet_blocks", 8, 256, 2, 1.0),
        ("deltanet", 16, 128, 1, 0.8),
        ("deltanet_blocks", 2, 1024, 8, 1.2),
    )
    records = [
        timed(op, num_heads=heads, num_value_heads=heads, key_dim=key_dim, blocks=blocks, forward_backward_ms=ms)
        for op, heads, key_dim, blocks, ms in layouts
    ]
    graphs = {"graph_forward_ms": 0.15, "graph_forward_backward_ms": 0.9}
    records += [
        timed("gated_deltanet", num_heads=8, num_value_heads=8, key_dim=256, blocks=1, graph_forward_ms=0.1),
        timed("gated_deltanet_blocks", num_heads=8, num_value_heads=8, key_dim=256, blocks=2, **graphs),
        timed("kda_blocks", blocks=4, forward_ms=None, forward_backward_ms=None, peak_mb=None),
    ]
    (tmp_path / "h200-block-diagonal.json").write_text(json.dumps(records))
    page = script.page(tmp_path)
    assert "| DeltaNet | 8 heads, K 256 | 0.200 |  |  | 2.000 |  |  | 640 |" in page
    assert "| DeltaNet | 8 heads, K 256, 2 blocks of 128 | 0.200 | 1.00 | 1.00 | 1.000 | 0.50 | 1.25 | 640 |" in page
    assert "| DeltaNet | 2 heads, K 1024, 8 blocks of 128 | 0.200 |  | 1.00 | 1.200 |  | 1.50 | 640 |" in page
    with_graphs = "| gated DeltaNet | 8 heads, K 256, 2 blocks of 128 | 0.200 (0.150) | 1.50 |  | 1.000 (0.900) |"
    assert with_graphs in page  # ratios are of the launches alone
    assert "| KDA | 16 heads, K 128, 4 blocks of 32 | failed |  |  | failed |  |  |  |" in page


def forms() -> list[dict[str, Any]]:
    return [
        timed(op, form=form, forward_ms=ms * seq_len / 512, seq_len=seq_len, batch=32768 // seq_len, key_dim=dim)
        for op in ("kda", "gla")
        for seq_len in (512, 32768)
        for dim in (64, 128)
        for form, ms in (("chunk", 0.25), ("recurrent", 1.0))
    ]


def test_forms_have_a_table_for_each_recurrence(script: Any, tmp_path: Path) -> None:
    (tmp_path / "h200-chunk-against-recurrent.json").write_text(json.dumps(forms()))
    page = script.page(tmp_path)
    assert "| T | D64 chunk | recurrent | times | D128 chunk | recurrent | times |" in page
    assert "### KDA" in page and "### GLA" in page and "32768 tokens" in page
    assert "| 512 | 0.250 | 1.000 | 4.0 | 0.250 | 1.000 | 4.0 |" in page
    assert "(figures/chunk-against-recurrent.png)" in page


def test_without_results_the_page_says_so(script: Any, tmp_path: Path) -> None:
    assert script.page(tmp_path / "absent").count(script.NOTHING) == 6
