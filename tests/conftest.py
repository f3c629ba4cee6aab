"""How every test runs: torch on one thread, after one small exp; those marked ``gpu`` where there is one."""

import pytest
import torch

from statemix.plugins import Registry, loading

# The tensors here are tiny: on two busy cores two threads took four to seven times as long as one.
torch.set_num_threads(1)

# torch 2.13 on some CPUs: the first vectorised exp after matrix products can be slightly wrong; a small one cures it.
torch.zeros(4).exp()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.skip(f"{item.name} needs a GPU")


@pytest.fixture(autouse=True)
def plugins_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers or runs does not outlive it."""
    for registry in Registry.every:
        for table in ("_classes", "_class_of_config"):
            monkeypatch.setattr(registry, table, dict(getattr(registry, table)))
    monkeypatch.setattr(loading, "_PLUGINS", dict(loading._PLUGINS))
    monkeypatch.setattr(loading, "_SOURCES", set(loading._SOURCES))
