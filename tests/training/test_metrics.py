"""metrics.jsonl: one object a line, and nothing twice after a resume."""

import json
from pathlib import Path

from statemix.training.metrics import MetricLog, read_metrics


def write(folder: Path, steps: range, *, keep_until: int) -> None:
    with MetricLog(folder, keep_until=keep_until) as log:
        for step in steps:
            log.write(step, {"loss": step / 3})


def test_lines_after_the_checkpoint_are_written_again_not_twice(tmp_path: Path) -> None:
    write(tmp_path, range(1, 8), keep_until=0)
    write(tmp_path, range(5, 10), keep_until=4)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 10))
    assert [line["loss"] for line in lines] == [step / 3 for step in range(1, 10)]  # floats survive exactly


def test_a_line_cut_off_by_a_crash_is_dropped(tmp_path: Path) -> None:
    write(tmp_path, range(1, 4), keep_until=0)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    with MetricLog(tmp_path, keep_until=3) as log:
        assert log.last == {"step": 3, "loss": 1.0}
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 3


def test_tensorboard_has_the_same_values(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write(tmp_path, range(1, 8), keep_until=0)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, 8))
