"""Whether the Triton kernels can run: on which device, for which dtypes and sizes of head, and if not, why.

Answers are reasons in words, None where nothing stands in the way. Triton is imported only to ask whether its
interpreter is on, which matters for tensors on the CPU alone.
"""

import importlib.util
from functools import cache

import torch

LARGEST_HEAD = 512  # channels of K and of V; the table of tiles has no row for wider heads
LEAST_CAPABILITY = (8, 0)  # bfloat16 products on tensor cores
SMALL_SHARED_MEMORY = ((8, 6), (8, 9), (12, 0), (12, 1))  # 99 KB a program; the table's tiles need an A100's 163
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ImportError:
        return False


HAS_TRITON = _is_installed("triton")


def is_interpreted() -> bool:
    """Triton runs its kernels in Python, on the CPU."""
    if not HAS_TRITON:
        return False
    import triton

    return bool(triton.knobs.runtime.interpret)


def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a GPU."""
    return _capability(torch.cuda.current_device() if device.index is None else device.index)


@cache  # a call of a scan asks six times, and torch takes some 3 us to answer
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def device_obstacle(device: torch.device) -> str | None:
    """Why no Triton kernel can run on ``device``."""
    if not HAS_TRITON:
        return "triton is not installed"
    if device.type == "cpu":
        return None if is_interpreted() else "the tensors are on the CPU and Triton's interpreter is off"
    if device.type != "cuda":
        return f"the tensors are on {device.type}, not on a GPU that Triton compiles for"
    if not torch.cuda.is_available():
        return "there is no GPU"
    gpu = capability(device)
    if torch.version.hip is None and gpu < LEAST_CAPABILITY:
        least = ".".join(map(str, LEAST_CAPABILITY))
        return f"the GPU has compute capability {gpu[0]}.{gpu[1]}, less than {least}"
    if torch.version.hip is None and gpu in SMALL_SHARED_MEMORY:
        return "the GPU has 99 KB of shared memory for a program, and the table has no tiles for less than 163"
    return None


# Compilers take the answer as it is. torch.compiler.assume_constant_result does this, and imports all of torch._dynamo.
device_obstacle._dynamo_marked_constant = True  # type: ignore[attr-defined]


def size_obstacle(dtype: torch.dtype, key_dim: int, value_dim: int) -> str | None:
    """Why the kernels cannot take heads of this size and dtype."""
    if dtype not in DTYPES:
        return f"q is {str(dtype).removeprefix('torch.')}, not float32, bfloat16 or float16"
    if key_dim > LARGEST_HEAD or value_dim > LARGEST_HEAD:
        return f"heads have K = {key_dim} and V = {value_dim}, more than {LARGEST_HEAD}"
    return None
