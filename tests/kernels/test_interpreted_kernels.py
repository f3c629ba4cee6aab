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
        "shapes, gates and packed documents": "test_shapes or test_gates or test_packed or test_batch",
        "memory, views, recomputing, the future, heads, the recurrent form and scan": "test_memory or test_upstream "
        "or test_recomputed or test_future or test_heads or test_recurrent or test_scan",
    },
    "interpreted_delta.py": {
        "recurrent": "test_recurrent or test_oracle",
    },
    "interpreted_delta_chunk.py": {
        "operands, the inverse and blocks": "test_operands or test_inverse or test_blocks",
        "shapes, chunk sizes, packed documents and gates": "test_shapes or test_chunk or test_batch or test_counts "
        "or test_packed or test_gates or test_equal",
        "segments, memory, views, recomputing, the future, heads and scan": "test_segments or test_memory "
        "or test_upstream or test_recomputed or test_future or test_heads or test_scan",
    },
}
PAIRS = [(file, group) for file, groups in GROUPS.items() for group in groups]


@pytest.mark.skipif(not availability.HAS_TRITON, reason="triton is not installed")
@pytest.mark.parametrize(("file", "group"), PAIRS)
def test_interpreted_kernels_are_those_of_the_definition(file: str, group: str) -> None:
    expect_to_pass(file, "-k", GROUPS[file][group], "-m", "not slow")


@pytest.mark.slow
@pytest.mark.skipif(not availability.HAS_TRITON, reason="triton is not installed")
def test_interpreted_kernels_are_those_of_the_definition_in_more_cases() -> None:
    expect_to_pass("interpreted_delta_chunk.py", "-m", "slow")


def expect_to_pass(file: str, *chosen: str) -> None:
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FOLDER / file), *chosen]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTEST_ADDOPTS", None)
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


@pytest.mark.parametrize("file", sorted(path.name for path in FOLDER.glob("interpreted_*.py")))
def test_every_interpreted_test_is_in_a_group(file: str) -> None:
    tests = re.findall(r"^def (test_\w+)", (FOLDER / file).read_text(encoding="utf-8"), re.MULTILINE)
    named = set(re.findall(r"test_\w+", " ".join(GROUPS[file].values())))
    assert tests and [test for test in tests if not any(test.startswith(name) for name in named)] == []
