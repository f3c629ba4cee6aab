"""The examples in docstrings run."""

import doctest
import importlib

import pytest
import torch

import statemix.transitions


@pytest.mark.parametrize("module", ["engine.attention_matrix", "identity", "engine.scan"])
def test_the_examples_in_docstrings_run(module: str) -> None:
    names = {name: getattr(statemix.transitions, name) for name in statemix.transitions.__all__} | {"torch": torch}
    loaded = importlib.import_module(f"statemix.transitions.{module}")
    results = doctest.testmod(loaded, extraglobs=names)
    assert results.attempted > 0 and results.failed == 0
