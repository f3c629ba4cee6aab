"""The example of a backend runs, is timed and passes the harness, in one short file from outside the package."""

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "02_backend.py"


def test_the_example_runs_and_passes_the_harness() -> None:
    done = subprocess.run([sys.executable, "-P", EXAMPLE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "backend='masked_product'" in done.stdout and "3 passed, 0 failed" in done.stdout
