"""The same random numbers whenever a test runs: now and then a draw is as ill-conditioned as no limit allows for."""

import pytest
import torch


def pytest_runtest_setup(item: pytest.Item) -> None:
    torch.manual_seed(0)
