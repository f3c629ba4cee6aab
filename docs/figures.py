"""Draw what each transition forgets, one PNG a transition: ``python docs/figures.py [FOLDER]``.

Left: eight items are stored under eight keys, then 24 tokens pass that write nothing; the colour is what reading with
the same key gives now, e_c^T M_1 ... M_t e_c. Right: random unit keys; the colour is how much of the write of token s
is still in the state after token t, |k_s^T M_{s+1} ... M_t| / |k_s|. Both come out of ``Transition.apply``.

One more is of docs/results/h200-chunk-against-recurrent.json, where that is: how many times as fast the chunk form is.

Shapes: T tokens, K channels; one sequence, one head.
"""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from statemix.benchmarks.ops import OPS
from statemix.transitions import (
    BlockDiagonal,
    DiagonalGate,
    FixedDecay,
    Householder,
    Identity,
    ScalarGate,
    Transition,
)

T, K = 24, 8
SPEEDS = Path(__file__).parent / "results" / "h200-chunk-against-recurrent.json"
COLOURS = ("#9ecae1", "#3182bd", "#08306b")  # narrow heads to wide ones


@dataclass(frozen=True)
class Tokens:
    """What the tokens of one panel say.

    Attributes:
        keys: unit vectors, [1, T, 1, K], or [1, T, 2, 1, K] for two steps a token.
        beta: [1, T, 1], or [1, T, 2, 1].
        alpha: decay of the whole state, [1, T, 1].
        alpha_by_channel: decay of each channel, [1, T, 1, K].
    """

    keys: Tensor
    beta: Tensor
    alpha: Tensor
    alpha_by_channel: Tensor


Make = Callable[[Tokens], Transition]

TRANSITIONS: dict[str, Make] = {
    "identity": lambda x: Identity(),
    "fixed_decay": lambda x: FixedDecay(torch.tensor([0.9], dtype=torch.float64).log()),
    "scalar_gate": lambda x: ScalarGate(x.alpha.log()),
    "diagonal_gate": lambda x: DiagonalGate(x.alpha_by_channel.log()),
    "householder": lambda x: Householder(x.keys, x.beta),
    "householder_count_2": lambda x: Householder(x.keys, x.beta),
    "gated_householder": lambda x: ScalarGate(x.alpha.log()) @ Householder(x.keys, x.beta),
    "diagonal_gated_householder": lambda x: DiagonalGate(x.alpha_by_channel.log()) @ Householder(x.keys, x.beta),
    "block_diagonal": lambda x: BlockDiagonal(Householder(unit_length(x.keys, blocks=2), x.beta), 2),
}


def draw_all(folder: Path, *, speeds: Path = SPEEDS) -> None:
    """Write ``NAME.png`` for every transition into ``folder``, and the picture of speeds where they were measured."""
    folder.mkdir(parents=True, exist_ok=True)
    if speeds.is_file():
        records = json.loads(speeds.read_text(encoding="utf-8"))
        draw_speeds(records).savefig(folder / "chunk-against-recurrent.png", dpi=80)
    for name, make in TRANSITIONS.items():
        steps = 2 if name.endswith("count_2") else 1
        quiet, busy = rotation() if steps == 2 else events(), chatter(steps=steps)
        written = make(busy).write_key
        keys = busy.keys if written is None else written
        right = influence(make(busy), keys if steps == 1 else keys[:, :, -1])
        draw(what_is_left(make(quiet)), right).savefig(folder / f"{name}.png", dpi=80)


def what_is_left(transition: Transition) -> Tensor:
    """e_c^T M_1 ... M_t e_c for t = 0 .. T, [K, T + 1]."""
    state = torch.eye(K, dtype=torch.float64).expand(1, 1, K, K)  # row c: the item stored under key e_c
    states = [state]
    for t in range(T):
        states.append(transition.at(t).apply(states[-1]))
    return torch.stack([state[0, 0].diagonal() for state in states], dim=1)


def influence(transition: Transition, keys: Tensor) -> Tensor:
    """|k_s^T M_{s+1} ... M_t| / |k_s| in row t, column s, [T, T], NaN for s > t; ``keys`` [1, T, 1, K]."""
    rows = torch.full((T, T), torch.nan, dtype=torch.float64)
    state = torch.zeros(1, 1, T, K, dtype=torch.float64)  # row s: what is left of the write of token s
    for t in range(T):
        state = transition.at(t).apply(state).index_copy(2, torch.tensor([t]), keys[:, t].unsqueeze(2))
        rows[t, : t + 1] = state[0, 0, : t + 1].norm(dim=-1)
    return rows / rows.diagonal()  # keys of unit length in each of b blocks have length b ** 0.5


def events() -> Tokens:
    """Little happens: beta is 0.5, 1 and 2 along channels 1, 3 and 5, then 1 half-way between channels 2 and 7."""
    keys = torch.eye(K, dtype=torch.float64)[:1].repeat(T, 1)
    beta = torch.zeros(T, dtype=torch.float64)
    for t, channels, step_size in ((4, [1], 0.5), (9, [3], 1.0), (14, [5], 2.0), (19, [2, 7], 1.0)):
        keys[t] = 0
        keys[t, channels] = len(channels) ** -0.5
        beta[t] = step_size
    return Tokens(keys.view(1, T, 1, K), beta.view(1, T, 1), *gates())


def rotation() -> Tokens:
    """Each token reflects along e_2, then along a vector 10 degrees from it in the plane of e_2 and e_3."""
    angle = torch.tensor([0.0, torch.pi / 18], dtype=torch.float64)
    pair = torch.zeros(2, 1, K, dtype=torch.float64)
    pair[:, 0, 2], pair[:, 0, 3] = angle.cos(), angle.sin()
    return Tokens(pair.expand(1, T, 2, 1, K), torch.full((1, T, 2, 1), 2.0, dtype=torch.float64), *gates())


def chatter(*, steps: int) -> Tokens:
    """Random unit keys, all with beta = 0.8."""
    generator = torch.Generator().manual_seed(0)
    lead = (1, T, 1) if steps == 1 else (1, T, steps, 1)
    keys = unit_length(torch.randn(*lead, K, generator=generator, dtype=torch.float64))
    return Tokens(keys, torch.full(lead, 0.8, dtype=torch.float64), *gates())


def gates() -> tuple[Tensor, Tensor]:
    """alpha = 0.97 with a reset to 0.3 at token 12; by channel 0.999 down to 0.7, the same at every token."""
    alpha = torch.full((1, T, 1), 0.97, dtype=torch.float64)
    alpha[:, 12] = 0.3
    return alpha, torch.linspace(0.999, 0.7, K, dtype=torch.float64).expand(1, T, 1, K)


def unit_length(x: Tensor, *, blocks: int = 1) -> Tensor:
    """x with length one in each block of channels; a block of zeros stays as it is."""
    by_block = x.unflatten(-1, (blocks, -1))
    return (by_block / by_block.norm(dim=-1, keepdim=True).clamp_min(1e-9)).flatten(-2)


def draw(left: Tensor, right: Tensor) -> Figure:
    """The two panels side by side."""
    figure = Figure(figsize=(8.4, 2.9), layout="constrained")
    one, two = figure.subplots(1, 2, width_ratios=(1.35, 1))
    panel(one, left, low=-1.0, colours="RdBu", title="read-out of an item stored at t = 0")
    one.set(xlabel="tokens seen since", ylabel="key it was stored under")
    panel(two, right, low=0.0, colours="viridis", title="what is left of the write of token s")
    two.set(xlabel="token s", ylabel="after token t")
    return figure


def panel(axes: Axes, values: Tensor, *, low: float, colours: str, title: str) -> None:
    """One picture with its scale from ``low`` to 1."""
    image = axes.imshow(values.numpy(), vmin=low, vmax=1.0, cmap=colours, aspect="auto", interpolation="nearest")
    axes.set_title(title, fontsize="medium")
    axes.figure.colorbar(image, ax=axes)


def draw_speeds(records: Sequence[dict[str, Any]]) -> Figure:
    """A panel for each recurrence, a line for each size of heads: times as fast as the recurrent kernel, by length."""
    times = {(r["op"], r["key_dim"], r["seq_len"], r["form"]): r["forward_ms"] for r in records if r["forward_ms"]}
    names = list(dict.fromkeys(op for op, *_ in times))
    dims, lengths = (sorted({key[n] for key in times}) for n in (1, 2))
    rows = -(-len(names) // 3)
    figure = Figure(figsize=(8.4, 0.6 + 2.5 * rows), layout="constrained")
    panels = figure.subplots(rows, 3, sharex=True, sharey=True, squeeze=False).flatten()
    for axes, name in zip(panels, names, strict=False):
        for dim, colour in zip(dims, COLOURS, strict=False):
            both = [n for n in lengths if {(name, dim, n, form) for form in ("chunk", "recurrent")} <= times.keys()]
            ratios = [times[name, dim, n, "recurrent"] / times[name, dim, n, "chunk"] for n in both]
            axes.plot(both, ratios, marker="o", markersize=4, color=colour, label=f"K = V = {dim}")
        axes.axhline(1, color="grey", linewidth=0.8, linestyle="--")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks(lengths, [f"{n // 1024}K" if n >= 1024 else str(n) for n in lengths])
        axes.yaxis.set_major_formatter("{x:g}")
        axes.grid(alpha=0.3)
        axes.set_title(OPS[name].label, fontsize="medium")
    for axes in panels[len(names) :]:
        axes.set_axis_off()
    panels[0].legend(fontsize="small")
    figure.supxlabel("T, the tokens of a sequence", fontsize="medium")
    figure.supylabel("times as fast as the recurrent kernel", fontsize="medium")
    return figure


if __name__ == "__main__":
    draw_all(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "figures")
