"""The digest by which results of compilation are found again: blind to names, sharp for code."""

import importlib.util
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from kernel_digest import source_digest  # noqa: E402
from kernel_variants import Variant  # noqa: E402

KERNEL = '''
import triton
import triton.language as tl

LIMIT = tl.constexpr(4.0)


@triton.jit
def bounded(x, scale, EXACT: tl.constexpr):
    """At most LIMIT."""
    return tl.minimum(x * scale, LIMIT) if EXACT else x


@triton.jit
def shifted(x):
    return x + 1.0


@triton.jit(do_not_specialize=["count"])
def kernel(x_ptr, y_ptr, count, BLOCK: tl.constexpr):
    steps = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for i in range(count):
        x = tl.load(x_ptr + steps + i, mask=steps < count, other=0.0)
        total += bounded(x, 0.5, EXACT=True)
        total = shifted(total)
    tl.store(y_ptr + steps, total, mask=steps < count)
'''

OTHER_NAMES = '''
"""Another module."""
import triton
import triton.language as language

SMALLEST, LARGEST = language.constexpr(-4.0), language.constexpr(4.0)


@triton.jit
def next_one(value):
    # a comment
    return value + 1.0


@triton.jit
def clamp(value, factor, IS_EXACT: language.constexpr):
    return language.minimum(value * factor, LARGEST) if IS_EXACT else value


@triton.jit(do_not_specialize=["length"])
def kernel(
    source_ptr,  # [length]
    target_ptr: language.tensor,
    length,
    WIDTH: language.constexpr,
) -> None:
    """Another docstring."""
    rows = (language.program_id(0) * WIDTH) + language.arange(0, WIDTH)
    result = language.zeros([WIDTH], dtype=language.float32)
    for step in range(length):
        row = language.load(
            source_ptr + rows + step,
            mask=rows < length,
            other=0.0,
        )
        result += clamp(row, 0.5, IS_EXACT=True)
        result = next_one(result)
    language.store(target_ptr + rows, result, mask=rows < length)
'''

# What is replaced, and by what.
CHANGES = {
    "a constant of the module": ("constexpr(4.0)", "constexpr(5.0)"),
    "a constant in the code": ("bounded(x, 0.5", "bounded(x, 0.25"),
    "a type": ("dtype=tl.float32", "dtype=tl.float64"),
    "an operator": ("total += bounded", "total -= bounded"),
    "the body of a device function": ("return x + 1.0", "return x + 1.5"),
    "which device function is called": ("shifted(total)", "bounded(total, 1.0, True)"),
    "which of Triton's functions is called": ("tl.minimum", "tl.maximum"),
    "the order of arguments": ("bounded(x, 0.5", "bounded(0.5, x"),
    "the value of a keyword": ("EXACT=True", "EXACT=False"),
    "a keyword of Triton's": ("other=0.0)", "cache_modifier='.cg')"),
    "the order of parameters": ("kernel(x_ptr, y_ptr", "kernel(y_ptr, x_ptr"),
    "a parameter known at compile time": ("count, BLOCK", "count: tl.constexpr, BLOCK"),
    "which of two variables is read": ("tl.store(y_ptr + steps, total", "tl.store(y_ptr + steps, x"),
    "whether a function is inlined": ("@triton.jit\ndef shifted", "@triton.jit(noinline=True)\ndef shifted"),
}


def digest(source: str, path: Path) -> str:
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return source_digest(module.kernel)


def test_other_names_comments_and_places_are_the_same_code(tmp_path: Path) -> None:
    assert digest(KERNEL, tmp_path / "first.py") == digest(OTHER_NAMES, tmp_path / "second.py")


def test_a_keyword_of_a_device_function_is_its_parameter(tmp_path: Path) -> None:
    by_place = KERNEL.replace("EXACT=True)", "True)")
    assert digest(KERNEL, tmp_path / "first.py") == digest(by_place, tmp_path / "second.py")


def test_a_device_function_of_a_module_is_that_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "of_tiles.py").write_text(KERNEL)
    monkeypatch.syspath_prepend(tmp_path)
    elsewhere = "import of_tiles as tiles\n" + KERNEL.replace("bounded(x, 0.5", "tiles.bounded(x, 0.5")
    assert digest(KERNEL, tmp_path / "first.py") == digest(elsewhere, tmp_path / "second.py")


@pytest.mark.parametrize(("old", "new"), CHANGES.values(), ids=CHANGES)
def test_other_code_has_another_digest(old: str, new: str, tmp_path: Path) -> None:
    assert KERNEL.count(old) == 1
    assert digest(KERNEL, tmp_path / "first.py") != digest(KERNEL.replace(old, new), tmp_path / "second.py")


@pytest.mark.parametrize(
    "other",
    [
        Variant("m", "k", "code", "sm_90", ((0, "*fp16"),), ((1, 64), (2, True)), 4, 1),
        Variant("m", "k", "code", "sm_90", ((0, "*bf16"),), ((1, 32), (2, True)), 4, 1),
        Variant("m", "k", "code", "sm_90", ((0, "*bf16"),), ((1, 64), (2, None)), 4, 1),
        Variant("m", "k", "code", "sm_80", ((0, "*bf16"),), ((1, 64), (2, True)), 4, 1),
        Variant("m", "k", "code", "sm_90", ((0, "*bf16"),), ((1, 64), (2, True)), 8, 1),
        Variant("m", "k", "code", "sm_90", ((0, "*bf16"),), ((1, 64), (2, True)), 4, 2),
        Variant("m", "k", "other", "sm_90", ((0, "*bf16"),), ((1, 64), (2, True)), 4, 1),
    ],
    ids=["type", "constant", "absent", "arch", "num_warps", "num_stages", "code"],
)
def test_a_key_is_of_code_types_constants_and_options_and_of_no_name(other: Variant) -> None:
    variant = Variant("m", "k", "code", "sm_90", ((0, "*bf16"),), ((1, 64), (2, True)), 4, 1)
    moved = Variant("n", "l", "code", "sm_90", ((0, "*bf16"),), ((1, 64), (2, True)), 4, 1)
    assert variant == moved and variant.key == moved.key
    assert variant.key != other.key
