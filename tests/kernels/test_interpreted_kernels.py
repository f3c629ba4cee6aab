"""Every Triton kernel under Triton's interpreter, on the CPU: the tests of ``interpreted_*.py``, one file a family.

An interpreted kernel cannot be compiled in the same process, and the interpreter is chosen when a kernel is defined. So
they run in processes of their own, one for each group.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from statemix.kernels import availability

FOLDER = Path(__file__).parent
GROUPS = {
    "interpreted_additive.py": {
        "shapes": "test_shapes and not diagonal",
        "shapes with a diagonal gate, and gates at their limits": "(test_shapes and diagonal) or test_gates",
        "packed documents": "test_packed or test_batch",
        "memory, views and recomputing": "test_memory or test_upstream or test_recomputed",
        "future, heads and the recurrent form": "test_future or test_heads or test_recurrent",
        "scan": "test_scan",
    },
    "interpreted_delta.py": {
        "recurrent": "test_recurrent or test_oracle",
    },
    "interpreted_delta_chunk.py": {
        "operands and the inverse": "test_operands or test_inverse",
        "shapes and chunk sizes": "test_shapes or test_chunk or test_batch or test_counts",
        "packed documents, segments and gates": "test_packed or test_segments or test_gates or test_equal",
        "memory, views, recomputing and the future": "test_memory or test_upstream or test_recomputed or test_future",
        "blocks": "test_blocks",
        "heads and scan": "test_heads or test_scan",
    },
}
PAIRS = [(file, group) for file, groups in GROUPS.items() for group in groups]


@pytest.mark.skipif(not availability.HAS_TRITON, reason="triton is not installed")
@pytest.mark.parametrize(("file", "group"), PAIRS)
def test_interpreted_kernels_are_those_of_the_definition(file: str, group: str) -> None:
    chosen = [str(FOLDER / file), "-k", GROUPS[file][group]]
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTEST_ADDOPTS", None)
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


@pytest.mark.parametrize("file", sorted(path.name for path in FOLDER.glob("interpreted_*.py")))
def test_every_interpreted_test_is_in_a_group(file: str) -> None:
    tests = re.findall(r"^def (test_\w+)", (FOLDER / file).read_text(encoding="utf-8"), re.MULTILINE)
    named = set(re.findall(r"test_\w+", " ".join(GROUPS[file].values())))
    assert tests and [test for test in tests if not any(test.startswith(name) for name in named)] == []
