"""What this machine has and which forms can run here: ``statemix env``."""

import importlib.util
import os
import platform
from importlib.metadata import PackageNotFoundError, version

import torch

PACKAGES = ("statemix", "torch", "triton", "numpy", "pydantic", "omegaconf", "safetensors", "tensorboard")


def describe_environment() -> str:
    """Versions, devices, and for each backend whether it runs and why not."""
    lines = [f"{'python':<14}{platform.python_version()} on {platform.system()} {platform.machine()}"]
    lines += [f"{name:<14}{_version(name)}" for name in PACKAGES]
    lines += [f"{'cpu':<14}{os.cpu_count()} cores, {torch.get_num_threads()} threads in torch"]
    lines += _devices()
    lines += [f"{'torch forms':<14}recurrent, chunk, parallel: run on every device above, in float32 and float64"]
    lines += [f"{'triton forms':<14}do not run: {_why_no_triton()}"]
    return "\n".join(lines)


def _devices() -> list[str]:
    if not torch.cuda.is_available():
        built = "torch is built without CUDA" if torch.version.cuda is None else "torch sees no device"
        return [f"{'gpu':<14}none: {built}"]
    return [
        f"{f'gpu {i}':<14}{p.name}, {p.total_memory / 2**30:.0f} GiB, compute capability {p.major}.{p.minor}"
        for i, p in ((i, torch.cuda.get_device_properties(i)) for i in range(torch.cuda.device_count()))
    ]


def _why_no_triton() -> str:
    reasons = ["this version has no Triton kernels"]
    if importlib.util.find_spec("triton") is None:
        reasons.append("triton is not installed")
    if not torch.cuda.is_available():
        reasons.append("there is no GPU")
    return "; ".join(reasons)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
