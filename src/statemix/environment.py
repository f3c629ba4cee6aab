"""What this machine has and which forms can run here: ``statemix env``."""

import os
import platform

import torch

from statemix.benchmarks.measured_on import installed_version
from statemix.kernels import device_obstacle

PACKAGES = ("statemix", "torch", "triton", "numpy", "pydantic", "omegaconf", "safetensors", "tensorboard")


def describe_environment() -> str:
    """Versions, devices, and for each backend whether it runs and why not."""
    lines = [f"{'python':<14}{platform.python_version()} on {platform.system()} {platform.machine()}"]
    lines += [f"{name:<14}{installed_version(name) or 'not installed'}" for name in PACKAGES]
    lines += [f"{'cpu':<14}{os.cpu_count()} cores, {torch.get_num_threads()} threads in torch"]
    lines += _devices()
    lines += [f"{'torch forms':<14}recurrent, chunk, parallel: run on every device above, in float32 and float64"]
    lines += [f"{'triton forms':<14}{_triton_forms()}"]
    return "\n".join(lines)


def _devices() -> list[str]:
    if not torch.cuda.is_available():
        built = "torch is built without CUDA" if torch.version.cuda is None else "torch sees no device"
        return [f"{'gpu':<14}none: {built}"]
    return [
        f"{f'gpu {i}':<14}{p.name}, {p.total_memory / 2**30:.0f} GiB, compute capability {p.major}.{p.minor}"
        for i, p in ((i, torch.cuda.get_device_properties(i)) for i in range(torch.cuda.device_count()))
    ]


def _triton_forms() -> str:
    gpus = [torch.device("cuda", i) for i in range(torch.cuda.device_count())] or [torch.device("cuda")]
    obstacles = [device_obstacle(gpu) for gpu in gpus]
    if None not in obstacles:
        return f"do not run: {'; '.join(dict.fromkeys(map(str, obstacles)))}"
    elsewhere = "".join(f", not on gpu {i}: {obstacle}" for i, obstacle in enumerate(obstacles) if obstacle is not None)
    return f"chunk, recurrent: run transitions with a normal form, in float32, bfloat16 and float16{elsewhere}"
