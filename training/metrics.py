"""What a run writes while it runs: metrics.jsonl, the same values for TensorBoard, and curves.png."""

import json
from collections.abc import Mapping
from pathlib import Path

from statemix.tasks import Metric

from .run_files import replaced, write_text

METRICS_FILE = "metrics.jsonl"
CURVES_FILE = "curves.png"


class MetricLog:
    """Appends to ``metrics.jsonl`` and to the TensorBoard events of a run folder; a context manager.

    A resumed run writes the steps after its checkpoint again, so what is later than ``keep_until`` is dropped first.

    Attributes:
        last: the last line kept from before, None in a new run.
    """

    def __init__(self, folder: Path, *, keep_until: int) -> None:
        # Slow to import, and of no use to whoever only loads a model.
        from torch.utils.tensorboard import SummaryWriter

        path = folder / METRICS_FILE
        kept = [line for line in read_metrics(path) if line["step"] <= keep_until]
        write_text(path, "".join(json.dumps(line) + "\n" for line in kept))
        self.last = kept[-1] if kept else None
        self._file = path.open("a", encoding="utf-8")
        self._events = SummaryWriter(str(folder), purge_step=keep_until + 1)

    def __enter__(self) -> "MetricLog":
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()
        self._events.close()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add one line ``{"step": step, **values}``; it is on its way to the disk when this returns."""
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()
        for name, value in values.items():
            self.add_event(f"train/{name}", value, step=step)

    def add_event(self, name: str, value: float, *, step: int) -> None:
        """Add one value for TensorBoard alone."""
        self._events.add_scalar(name, value, step)


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The lines of ``metrics.jsonl``, none when there is no file; a last line cut off by a crash is left out."""
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def draw_curves(folder: Path, *, title: str, metric: Metric) -> None:
    """Draw ``metrics.jsonl`` of a run folder; the loss as the metric, where it stands for one."""
    # Slow to import; the Figure class draws with Agg and needs neither pyplot's global state nor a display.
    from matplotlib.figure import Figure

    lines = read_metrics(folder / METRICS_FILE)
    steps = [line["step"] for line in lines]
    shown = metric.from_loss or (lambda nats: nats)
    figure = Figure(figsize=(7, 6))
    loss_axis, lr_axis = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    loss_axis.plot(steps, [shown(line["loss"]) for line in lines], marker="." if len(lines) < 40 else "")
    loss_axis.set(title=title, ylabel=metric.words if metric.from_loss else "loss (nats)")
    lr_axis.plot(steps, [line["lr"] for line in lines])
    lr_axis.set(xlabel="step", ylabel="learning rate")
    for axis in (loss_axis, lr_axis):
        axis.grid(alpha=0.3)
    with replaced(folder / CURVES_FILE) as temporary:
        figure.savefig(temporary, format="png", dpi=110)
