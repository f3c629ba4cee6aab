"""The picture of attention-like matrices is drawn as its file says."""

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "01_attention_matrices.py"


def test_the_example_draws_its_picture(tmp_path: Path) -> None:
    picture = tmp_path / "matrices.png"
    done = subprocess.run([sys.executable, "-P", EXAMPLE, picture], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG") and str(picture) in done.stdout
