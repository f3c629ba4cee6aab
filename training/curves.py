"""curves.png: the training loss and the learning rate of a run over its steps."""

import math
from pathlib import Path

from .metric_log import METRICS_FILE, read_metrics
from .replaced import replaced

CURVES_FILE = "curves.png"


def draw_curves(folder: Path, *, title: str, in_bits: bool) -> None:
    """Draw ``metrics.jsonl`` of a run folder; ``in_bits`` shows the loss as bits per byte."""
    # Slow to import; the Figure class draws with Agg and needs neither pyplot's global state nor a display.
    from matplotlib.figure import Figure

    lines = read_metrics(folder / METRICS_FILE)
    steps = [line["step"] for line in lines]
    unit = math.log(2) if in_bits else 1.0
    figure = Figure(figsize=(7, 6))
    loss_axis, lr_axis = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    loss_axis.plot(steps, [line["loss"] / unit for line in lines], marker="." if len(lines) < 40 else "")
    loss_axis.set(title=title, ylabel="bits per byte" if in_bits else "loss (nats)")
    lr_axis.plot(steps, [line["lr"] for line in lines])
    lr_axis.set(xlabel="step", ylabel="learning rate")
    for axis in (loss_axis, lr_axis):
        axis.grid(alpha=0.3)
    with replaced(folder / CURVES_FILE) as temporary:
        figure.savefig(temporary, format="png", dpi=110)
