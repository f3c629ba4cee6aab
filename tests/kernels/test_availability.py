"""What stands in the way of the Triton kernels is said in words."""

import pytest
import torch

from statemix.kernels import availability


def test_the_interpreter_is_off_where_triton_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability, "HAS_TRITON", False)
    assert not availability.is_interpreted()
    assert availability.device_obstacle(torch.device("cuda")) == "triton is not installed"


def test_what_stands_in_the_way_is_said_in_words() -> None:
    assert availability.size_obstacle(torch.bfloat16, 512, 512) is None
    assert "float64" in str(availability.size_obstacle(torch.float64, 64, 64))
    assert "V = 513" in str(availability.size_obstacle(torch.float32, 64, 513))
    assert "interpreter is off" in str(availability.device_obstacle(torch.device("cpu")))
    assert "mps" in str(availability.device_obstacle(torch.device("mps")))


def test_a_gpu_that_the_table_has_no_tiles_for_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def has(major: int, minor: int) -> str | None:
        monkeypatch.setattr(availability, "capability", lambda device: (major, minor))
        return availability.device_obstacle(torch.device("cuda"))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert has(8, 0) is None
    assert has(9, 0) is None
    assert "99 KB" in str(has(8, 9))
    assert "capability 7.5" in str(has(7, 5))
