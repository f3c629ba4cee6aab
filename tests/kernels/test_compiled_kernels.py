"""Kernels compiled for four archs of GPUs with no GPU: shared memory, spills, and registers read before a write.

Each arch compiles in a process of its own, since kernels that another test has imported under Triton's interpreter
cannot be compiled. All variants under three versions of Triton: ``make compile-matrix``, whose result is checked here.
"""

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import compile_matrix  # noqa: E402
import kernel_calls  # noqa: E402
from compiler_process import CompilerProcess  # noqa: E402
from kernel_variants import Result, Variant  # noqa: E402
from machine_code import early_reads, parse_sass, read, written  # noqa: E402

from statemix.kernels.launch_config import ARCHS, Arch  # noqa: E402

# What ptxas 12.8.93 made of an inter-chunk scan with blocks of 16 values, 4 warps and 1 stage for sm_90.
HOISTED_DESCRIPTOR = """
    LDC R1, c[0x0][0x28]
    S2R R0, SR_TID.X
    UMOV UR4, 0x400
    S2UR UR6, SR_CgaCtaId
    ULEA UR4, UR6, UR4, 0x18
    UIADD3 UR18, UP0, UR18, 0x20, URZ
    USHF.R.U32.HI UR4, URZ, 0x4, UR4
    UIADD3.X UR19, UR19, -0x3ffffff0, URZ, UP0, !UPT
    USGXT.U32 UR18, UR4, 0xe
    CS2R R24, SRZ
    HGMMA.64x16x16.F32.BF16 R24, R32, gdesc[UR16].tnspB, RZ, !UPT
    EXIT
"""

RIGHT_CODE = {
    "a guarded write": """
        S2R R0, SR_TID.X
        ISETP.GT.AND P0, PT, R0, 0x7, PT
        @!P0 LDS R4, [R0]
        SHFL.BFLY PT, R5, R4, 0x1, 0x1f
        EXIT
    """,
    "a load of four registers": """
        ULDC.64 UR16, c[0x0][0x208]
        LDC.64 R2, c[0x0][0x210]
        LDG.E.128 R12, desc[UR16][R2.64+0x10]
        FADD R4, R12, R15
        STG.E.64 desc[UR16][R2.64], R14
        EXIT
    """,
    "a spill of zero": "LDC R1, c[0x0][0x28]\nSTL [R1+0x8], RZ\nLDL.LU R7, [R1+0x8]\nFADD R8, R7, R7\nEXIT",
    "a spill of a register without a value beside one with": """
        LDC R1, c[0x0][0x28]
        MOV R4, RZ
        STL.64 [R1+0x8], R4
        LDL R6, [R1+0x8]
        LDL R7, [R1+0xc]
        FADD R8, R6, R6
        EXIT
    """,
    "one half of a register": """
        S2R R0, SR_TID.X
        PRMT R7, R0, 0x7610, R7
        EXIT
    """,
    "one bit of a word of flags": """
        LOP3.LUT R3, R3, 0xffffffef, RZ, 0xc0, !PT
        EXIT
    """,
    "a branch whose arms both write": """
        S2R R0, SR_TID.X
        ISETP.GT.AND P0, PT, R0, 0x7, PT
        @P0 BRA 0x50
        MOV R4, 0x1
        BRA 0x60
        MOV R4, R0
        FADD R5, R4, R4
        EXIT
    """,
    "a loop with a divergent branch inside": """
        S2R R0, SR_TID.X
        BSSY B0, 0x30
        BSYNC B0
        MOV R4, RZ
        BSSY B0, 0x80
        ISETP.GT.AND P0, PT, R0, R4, PT
        @P0 BRA 0x80
        BSYNC B0
        IADD3 R4, R4, 0x1, RZ
        @P1 BRA 0x40
        EXIT
    """,
}

# Registers read and written, as nvdisasm of CUDA 12.8 prints life ranges.
OPERANDS = [
    ("IADD3 R7, P0, P1, R6.reuse, UR6, R3", "R6 UR6 R3", "R7"),
    ("ISETP.GE.AND P0, PT, R28, 0x1, PT", "R28", ""),
    ("LOP3.LUT P2, RZ, R2, 0x8, RZ, 0xc0, !PT", "R2", ""),
    ("IMAD.WIDE.U32 R2, R51, R2, c[0x0][0x188]", "R51 R2", "R2 R3"),
    ("IMAD.WIDE R8, R4, 0x2, R6", "R4 R6 R7", "R8 R9"),
    ("STS.64 [R2+UR4], R12", "R2 UR4 R12 R13", ""),
    ("LDSM.16.MT88.4 R44, [R3+UR4]", "R3 UR4", "R44 R45 R46 R47"),
    ("CS2R R24, SRZ", "", "R24 R25"),
    ("UIADD3.64 UR22, UR18, 0x20, URZ", "UR18 UR19", "UR22 UR23"),
    ("F2F.F32.F64 R4, R8", "R8 R9", "R4"),
    ("F2F.F64.F32 R4, R8", "R8", "R4 R5"),
    ("HMMA.16816.F32.BF16 R4, R8, R12, R4", "R8 R9 R10 R11 R12 R13 R4 R5 R6 R7", "R4 R5 R6 R7"),
    ("HGMMA.64x8x16.F32.BF16 R4, gdesc[UR8], RZ, !UPT", "UR8 UR9 UR10 UR11", "R4 R5 R6 R7"),
    ("HGMMA.64x8x16.F32.BF16 R4, R8, gdesc[UR8], R4", "R8 R9 R10 R11 UR10 UR11 R4 R5 R6 R7", "R4 R5 R6 R7"),
]


def sass(lines: str) -> str:
    """The lines as cuobjdump prints them, 16 bytes an instruction."""
    split = [line.strip() for line in lines.strip().splitlines()]
    return "\n".join(f"        /*{16 * n:04x}*/   {line} ;    /* 0x0000 */" for n, line in enumerate(split))


def test_a_descriptor_computed_before_its_base_is_found() -> None:
    found = [str(early) for early in early_reads(parse_sass(sass(HOISTED_DESCRIPTOR)))]
    assert found[0] == "UR18 read before it is written at 0x0050: UIADD3 UR18, UP0, UR18, 0x20, URZ"
    assert found[1].startswith("UR19 ")


def test_a_register_that_a_loop_writes_too_late_is_found() -> None:
    loop = "MOV R0, RZ\nMOV R2, R6\nMOV R6, 0x1\n@P0 BRA 0x10\nEXIT"
    assert [early.register for early in early_reads(parse_sass(sass(loop)))] == ["R6"]


def test_what_comes_back_from_the_stack_without_a_value_is_found() -> None:
    spilled = "LDC R1, c[0x0][0x28]\nMOV R4, RZ\nSTL.64 [R1+0x8], R4\nLDL R7, [R1+0xc]\nFADD R8, R4, R7\nEXIT"
    assert [early.register for early in early_reads(parse_sass(sass(spilled)))] == ["R7"]


@pytest.mark.parametrize("lines", RIGHT_CODE.values(), ids=RIGHT_CODE)
def test_right_code_is_not_suspected(lines: str) -> None:
    assert early_reads(parse_sass(sass(lines))) == []


@pytest.mark.parametrize(("line", "reads", "writes"), OPERANDS, ids=[line for line, _, _ in OPERANDS])
def test_registers_of_an_instruction(line: str, reads: str, writes: str) -> None:
    (instruction,) = parse_sass(sass(line))
    assert (read(instruction), written(instruction)) == (set(reads.split()), set(writes.split()))


def test_a_variant_that_ends_the_compiler_gets_that_as_its_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ends_the_process.py").write_text("import os\nos._exit(7)\n")
    monkeypatch.syspath_prepend(tmp_path)
    variant = Variant("ends_the_process", "kernel", "", "sm_80", (), (), 4, 1)
    with CompilerProcess() as compiler:
        assert compiler.compile(variant).fault == "the compiler ended its process with 7"
        assert "No module named 'absent'" in str(compiler.compile(replace(variant, module="absent")).fault)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("decay", ["none", "scalar", "diagonal"])
@pytest.mark.parametrize("reads_before_decay", [False, True])
def test_an_inverse_is_made_of_float16_parts_where_no_decay_makes_its_matrix_small(
    arch: Arch, dtype: torch.dtype, decay: kernel_calls.Decay, reads_before_decay: bool
) -> None:
    """Entries below 6e-8 have no float16: with gates of -20 the gradient of a direction was lost."""
    call = kernel_calls.Configuration("delta", decay, 64, 64, dtype, reads_before_decay=reads_before_decay)
    [inverse] = [x for x in kernel_calls.record(call, arch) if x.kernel.__name__ == "triangular_inverse_kernel"]
    has_decay = decay == "diagonal" or (decay == "scalar" and reads_before_decay)
    in_parts = dtype != torch.float32 and arch != "gfx942" and not has_decay
    assert (inverse.constants["EXACT"] == "float16x3") == in_parts


@pytest.mark.parametrize(("saves", "count"), [(True, 1), (False, 2)])
def test_maps_of_segments_are_walked_once_where_they_are_saved(saves: bool, count: int) -> None:
    call = kernel_calls.Configuration("delta", "scalar", 128, 128, layout=kernel_calls.FEW_HEADS, saves=saves)
    walks = [x for x in kernel_calls.record(call, "sm_90") if x.kernel.__name__ == "delta_scan_kernel"]
    assert sum(x.args[x.kernel.arg_names.index("maps_ptr")] is not None for x in walks) == count


@pytest.mark.parametrize("complete", [("sm_90",), ARCHS])
def test_the_matrix_holds_what_is_complete_and_ends_where_what_was_asked_for_is_not(
    complete: tuple[Arch, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variants: dict[Arch, Variant] = {arch: Variant("m", "k", "", arch, (), (), 4, 1) for arch in ARCHS}
    for name in ("MATRIX", "KEPT"):
        monkeypatch.setattr(compile_matrix, name, tmp_path / name)
    monkeypatch.setattr(compile_matrix, "calls_by_variant", lambda archs: {variants[x]: "call" for x in archs})
    lines = [{"key": variants[x].key, "triton": "3.10.0"} | asdict(Result()) for x in complete]
    compile_matrix.KEPT.write_text("\n".join(map(json.dumps, lines)))
    assert compile_matrix.write_matrix(["3.10.0"], complete) == 0
    matrix = json.loads(compile_matrix.MATRIX.read_text())
    assert matrix["compiled"] == {"3.10.0": list(complete)} and len(matrix["variants"]) == len(complete)
    with pytest.raises(SystemExit, match=r"not complete under Triton 3.4.0: \{'k': 1\}"):
        compile_matrix.write_matrix(["3.4.0"], complete)


def test_a_limit_of_registers_makes_another_variant() -> None:
    call = kernel_calls.Configuration("delta", "none", 128, 128)
    limited = {x for x in compile_matrix.calls_by_variant(["sm_90"], [call]) if x.max_registers is not None}
    assert {x.kernel for x in limited} == {"ut_transform_kernel", "_score_gradients_kernel"}
    assert all(x.key != replace(x, max_registers=None).key for x in limited)


def test_launches_are_written_in_their_order_and_with_the_memory_that_they_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = kernel_calls.Configuration("additive", "scalar", 64, 64)
    monkeypatch.setattr(compile_matrix, "configurations", lambda: [call])
    compile_matrix.write_launches(tmp_path / "launches")
    lines = [json.loads(line) for line in (tmp_path / "launches").read_text().splitlines()]
    assert [line[0] for line in lines] == sorted((line[0] for line in lines), key=ARCHS.index)
    found = {(line[1], line[2]) for line in lines}
    assert found == {(call, x.key) for x, call in compile_matrix.calls_by_variant(ARCHS).items()}
    gate, scan = (line[4] for line in lines[:2])
    assert gate[1] in scan and gate[1][0] == "torch.float32" and gate[1][1] == [2, 16, 32768]


@pytest.mark.parametrize("is_packed", [False, True])
def test_thirty_lengths_compile_nothing_after_the_first_three(is_packed: bool) -> None:
    def variants(seq_len: int) -> set[Variant]:
        layout = replace(kernel_calls.MANY_HEADS, batch=1, seq_len=seq_len)
        call = kernel_calls.Configuration("additive", "scalar", 64, 64, layout=layout, is_packed=is_packed)
        return set(compile_matrix.calls_by_variant(["sm_90"], [call]))

    first, *others = (variants(seq_len) for seq_len in (1000, 1999, 2048, *range(1003, 4000, 111)))
    known = first.union(*others[:2])
    assert len(others) == 29
    assert all(found <= known for found in others[2:])


# It takes 40 s an arch. What the others make of these very sources stands in the committed matrix, see below.
@pytest.mark.parametrize("arch", [x if x == "sm_90" else pytest.param(x, marks=pytest.mark.slow) for x in ARCHS])
def test_a_sample_of_kernels_compiles_and_fits(arch: str) -> None:
    command = [sys.executable, "-P", str(ROOT / "tools" / "compile_matrix.py"), "--sample", arch]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert 10 <= len(results) <= 40  # for one arch; `make test` compiles no more than 120 in all
    for result in results:
        print("{call}: {kernel} spills {spills} registers, {shared} bytes, {seconds} s".format(**result))
    assert [result for result in results if result["fault"]] == []


def test_the_committed_matrix_is_of_these_kernels_and_holds_no_fault() -> None:
    matrix = json.loads(compile_matrix.MATRIX.read_text())
    compiled = matrix["compiled"]
    assert {arch for found in compiled.values() for arch in found} == set(ARCHS) and len(compiled) == 3
    keys = {variant.key for variant in compile_matrix.calls_by_variant(ARCHS)}
    assert {entry["key"] for entry in matrix["variants"]} == keys, "the kernels have changed; run make compile-matrix"
    for entry in matrix["variants"]:
        assert list(entry["results"]) == [version for version in compiled if entry["arch"] in compiled[version]]
    fault = matrix["columns"].index("fault")
    faults = [
        (entry["call"], entry["kernel"], version, result[fault])
        for entry in matrix["variants"]
        for version, result in entry["results"].items()
        if result[fault] is not None
    ]
    assert faults == []
