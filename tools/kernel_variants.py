"""From launches to compiled kernels, with no GPU: what a launch makes Triton compile, and what came of it.

Triton compiles a kernel once for each set of argument types, absent arguments, compile-time constants and options; such
a set is a *variant*. Tensors count as aligned to 16 bytes, as torch allocates them, and integers never count by value:
a kernel that let them would compile anew for another length.
"""

import hashlib
import importlib
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import triton
from kernel_digest import source_digest
from machine_code import early_reads, parse_sass
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from statemix.kernels.launch import Launch
from statemix.kernels.launch_config import Arch

TARGETS: dict[Arch, GPUTarget] = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}

# Bytes that one program can have: CUDA C++ programming guide, table of compute capabilities; CDNA 3 ISA, section 1.
SHARED_LIMIT: dict[Arch, int] = {"sm_80": 166_912, "sm_90": 232_448, "sm_100": 232_448, "gfx942": 65_536}

_TYPES = {
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int32: "i32",
    torch.int64: "i64",
}


@dataclass(frozen=True)
class Variant:
    """One compilation of one kernel.

    Attributes:
        module, kernel: where it is defined; for people and the compiler, no part of what it is.
        source: digest of its code and of all device functions it calls.
        arch: the device.
        types: type of each run-time parameter that is there by its place, e.g. ``(0, "*bf16")``.
        constants: value of each compile-time parameter by its place, None for absent arguments.
        num_warps, num_stages, max_registers: options.
    """

    module: str = field(compare=False)
    kernel: str = field(compare=False)
    source: str
    arch: Arch
    types: tuple[tuple[int, str], ...]
    constants: tuple[tuple[int, Any], ...]
    num_warps: int
    num_stages: int
    max_registers: int | None = None

    @property
    def key(self) -> str:
        """Names the variant; equal for equal code and settings."""
        settings = [getattr(self, part.name) for part in fields(self) if part.compare]
        return hashlib.sha256(repr(settings).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Result:
    """What a compiler made of a variant.

    Attributes:
        shared: shared memory of one program, bytes.
        registers: of one thread; vector registers on gfx942.
        spills: 32-bit registers of one thread kept in memory.
        seconds: to compile, from nothing.
        fault: why it must not run, or None.
    """

    shared: int = 0
    registers: int = 0
    spills: int = 0
    seconds: float = 0.0
    fault: str | None = None


def variants_of(launches: Iterable[Launch], arch: Arch) -> Iterator[Variant]:
    """The variant of each launch."""
    for launch in launches:
        names = launch.kernel.arg_names
        arguments = dict(zip(names, launch.args, strict=False)) | launch.constants
        if missing := set(names) - set(arguments):
            raise TypeError(f"{launch.kernel.__name__}: no argument for {sorted(missing)}")
        types, constants = [], []
        for place, parameter in enumerate(launch.kernel.params):
            argument = arguments[parameter.name]
            if argument is None or parameter.name in launch.constants:
                constants.append((place, argument))
            else:
                types.append((place, _type(argument, parameter)))
        yield Variant(
            launch.kernel.fn.__module__,
            launch.kernel.__name__,
            source_digest(launch.kernel),
            arch,
            tuple(types),
            tuple(constants),
            launch.num_warps,
            launch.num_stages,
            launch.max_registers,
        )


def _type(argument: Any, parameter: Any) -> str:
    if isinstance(argument, torch.Tensor):
        return "*" + _TYPES[argument.dtype]
    if isinstance(argument, float):
        return "fp32"
    if not isinstance(argument, int) or isinstance(argument, bool):
        raise TypeError(f"{parameter.name}: expected a tensor, number or None, got {type(argument).__name__}")
    if not parameter.do_not_specialize:
        raise ValueError(f"{parameter.name}: expected to be listed in do_not_specialize; it would compile by its value")
    return "i32" if -(2**31) <= argument < 2**31 else "i64"


def compile_variant(variant: Variant) -> Result:
    """Compile from nothing and look at the code; what the compiler refuses becomes a fault."""
    _leave_out_the_linker_of_rocm()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        start = time.perf_counter()
        try:
            compiled = triton.compile(_source(variant), target=TARGETS[variant.arch], options=_options(variant))
        except Exception as error:  # of many kinds, from the front end to ptxas
            return Result(seconds=_since(start), fault=f"does not compile: {_first_line(error)}")
        seconds = _since(start)
        if variant.arch == "gfx942":
            registers, spills, fault = *_amd_resources(compiled.asm["amdgcn"]), None
        else:
            cubin = Path(folder, "kernel.cubin")
            cubin.write_bytes(compiled.asm["cubin"])
            registers, spills, fault = _look_at(cubin, variant.arch)
    shared, limit = compiled.metadata.shared, SHARED_LIMIT[variant.arch]
    if shared > limit:
        fault = f"{shared} bytes of shared memory, {variant.arch} has {limit}"
    return Result(shared, registers, spills, seconds, fault)


def _source(variant: Variant) -> ASTSource:
    kernel = getattr(importlib.import_module(variant.module), variant.kernel)
    types = dict(variant.types)
    aligned: list[list[Any]] = [["tt.divisibility", 16]]
    if variant.arch == "gfx942":
        aligned.append(["tt.pointer_range", 32])  # what a launch says of a tensor below 2 GB
    return ASTSource(
        kernel,
        {name: types.get(place, "constexpr") for place, name in enumerate(kernel.arg_names)},
        {(place,): value for place, value in variant.constants},
        {(place,): aligned for place, kind in variant.types if kind.startswith("*")},
    )


def _look_at(cubin: Path, arch: Arch) -> tuple[int, int, str | None]:
    """Registers, spilled registers, and the first read of a register that nothing wrote (sm_90 only)."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    options = ["--dump-resource-usage"] + ["--dump-sass"] * (arch == "sm_90")
    text = subprocess.run([tool, *options, cubin], capture_output=True, text=True, check=True).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert usage is not None, text
    early = early_reads(parse_sass(text)) if arch == "sm_90" else []
    return int(usage[1]), int(usage[2]) // 4, str(early[0]) if early else None


def _amd_resources(assembly: str) -> tuple[int, int]:
    found = dict(re.findall(r"^\s+\.(vgpr_count|vgpr_spill_count|sgpr_spill_count):\s+(\d+)", assembly, re.MULTILINE))
    return int(found["vgpr_count"]), int(found["vgpr_spill_count"]) + int(found["sgpr_spill_count"])


def _leave_out_the_linker_of_rocm() -> None:
    """Triton 3.4 links with ROCm's ld.lld, which no wheel carries; the assembly says all that is asked here."""
    from triton.backends.amd.compiler import HIPBackend

    if hasattr(HIPBackend, "path_to_rocm_lld"):
        HIPBackend.make_hsaco = staticmethod(lambda assembly, metadata, options: b"")
        HIPBackend.hash = lambda self: f"{self.target} without linker"


def _options(variant: Variant) -> dict[str, int]:
    """What Triton is told besides types and constants."""
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    return options if variant.max_registers is None else {**options, "maxnreg": variant.max_registers}


def _since(start: float) -> float:
    return round(time.perf_counter() - start, 2)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"[:200]
