"""How every test runs: torch on one thread, after one small exp; those marked ``gpu`` where there is one."""

import pytest
import torch

# The tensors here are tiny: on two busy cores two threads took four to seven times as long as one.
torch.set_num_threads(1)

# torch 2.13 on some CPUs: the first vectorised exp after matrix products can be slightly wrong; a small one cures it.
torch.zeros(4).exp()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.skip(f"{item.name} needs a GPU")
