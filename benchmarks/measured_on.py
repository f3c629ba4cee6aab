"""Where a figure comes from: the device, the versions, and the source of the kernels that it belongs to."""

import datetime
import hashlib
import json
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("statemix", "torch", "triton")


def provenance(device: str, *more_packages: str) -> dict[str, Any]:
    """What every record of a measurement holds: gpu, versions, date, and the digest of the kernels' source."""
    return {
        "gpu": gpu_name(device),
        "versions": versions(*more_packages),
        "date": datetime.date.today().isoformat(),
        "source": source_digest(),
    }


def write_records(path: Path | None, records: Sequence[dict[str, Any]]) -> None:
    """JSON, one record a line, where there is a path; what stood there is replaced."""
    if path is not None:
        path.write_text("[\n" + ",\n".join(map(json.dumps, records)) + "\n]\n", encoding="utf-8")


def gpu_name(device: str) -> str:
    """The name of a GPU, or "none" for a CPU."""
    return torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else "none"


def versions(*more_packages: str) -> dict[str, str]:
    """Versions of what the kernels run on, and of ``more_packages`` where they are installed."""
    named = {name: installed_version(name) for name in (*PACKAGES, *more_packages)}
    found = {"python": platform.python_version()} | {name: number for name, number in named.items() if number}
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    return found


def installed_version(name: str) -> str | None:
    """Version of a package, None where it is not installed.

    A package that is loaded says it itself: torch names its build, as in 2.14.1+cu130, where metadata may say 2.14.1.
    """
    loaded = getattr(sys.modules.get(name), "__version__", None)
    try:
        return str(loaded or version(name))
    except PackageNotFoundError:
        return None


def source_digest() -> str:
    """Sixteen digits that change with any file of the kernels."""
    from statemix import kernels

    digest = hashlib.sha256()
    for file in sorted(Path(kernels.__path__[0]).rglob("*.py")):
        digest.update(file.name.encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
