"""The layer table of a recipe: what each layer is, how large it is, what it carries from token to token, what runs it.

Nothing is allocated: parameters are counted on the meta device, state sizes come from the mixers.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch

from statemix.blocks import Block

from .loading import build
from .recipe import Recipe


@dataclass(frozen=True)
class LayerRow:
    """One layer.

    Attributes:
        formula: M_t in words for a state mixer, the keys in reach for attention.
        kernel: what runs the mixer in training, backend and form.
    """

    index: int
    name: str
    mixer: str
    formula: str
    parameters: int
    state_bytes: int
    kernel: str


@dataclass(frozen=True)
class LayerTable:
    """All layers and the totals.

    Attributes:
        title: name and source of the recipe.
        rows: one a layer.
        outer_parameters: embedding, last norm and head (a tied head counts once).
        parameters: of the whole model.
        state_bytes: of the whole model for one sequence of ``seq_len`` tokens, float32.
        device: where the kernels would run, "cuda" or "cpu".
        unused: layers that neither stack nor replace names.
    """

    title: str
    rows: tuple[LayerRow, ...]
    outer_parameters: int
    parameters: int
    state_bytes: int
    seq_len: int
    device: str
    unused: tuple[str, ...]


def layer_table(recipe: Recipe, seq_len: int | None = None, *, device: str | None = None) -> LayerTable:
    """Count parameters and state bytes of ``recipe``, after ``seq_len`` tokens (default: those of its training).

    Args:
        device: to ask which kernels would run there; None takes a GPU when there is one, as training does.
    """
    seq_len = recipe.training.seq_len if seq_len is None else seq_len
    if seq_len < 1:
        raise ValueError(f"seq_len: expected 1 or more tokens, got {seq_len}")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    with torch.device("meta"):
        model = build(recipe)
    names, blocks = recipe.layer_names, cast(Sequence[Block], model.blocks)
    rows = tuple(
        LayerRow(
            index=index,
            name=name,
            mixer=layer.mixer.type,
            formula=block.mixer.formula,
            parameters=_count(block),
            state_bytes=block.mixer.state_bytes(seq_len),
            kernel=block.mixer.kernel(seq_len, torch.device(device)),
        )
        for index, (name, layer, block) in enumerate(zip(names, recipe.layer_configs, blocks, strict=True))
    )
    return LayerTable(
        title=" - ".join(part for part in (recipe.name, recipe.source) if part),
        rows=rows,
        outer_parameters=_count(model) - sum(row.parameters for row in rows),
        parameters=_count(model),
        state_bytes=sum(row.state_bytes for row in rows),
        seq_len=seq_len,
        device=device,
        unused=tuple(name for name in recipe.layers if name not in names),
    )


def render(table: LayerTable, *, width: int = 130) -> str:
    """The table as plain ASCII text, at most ``width`` columns wide."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    grid = Table(title=table.title, title_justify="left", box=box.ASCII2, show_footer=True)
    grid.add_column("layer", "", justify="right")
    grid.add_column("name", "total")
    grid.add_column("mixer", "")
    grid.add_column("M_t", "")
    grid.add_column("parameters", f"{table.parameters:,}", justify="right")
    grid.add_column(f"state bytes at {table.seq_len:,} tokens", f"{table.state_bytes:,}", justify="right")
    grid.add_column("runs as", "")
    for row in table.rows:
        counts = f"{row.parameters:,}", f"{row.state_bytes:,}"
        grid.add_row(str(row.index), row.name, row.mixer, row.formula, *counts, row.kernel)
    grid.add_row("", "around", "", "embedding, last norm, head", f"{table.outer_parameters:,}", "0", "")
    notes = [f"runs as: in training on {table.device}"]
    if table.unused:
        notes.append(f"not used by the stack: {', '.join(table.unused)}")
    grid.caption = "\n".join(notes)
    text = io.StringIO()
    Console(file=text, width=width, color_system=None, markup=False, highlight=False).print(grid)
    return "\n".join(line.rstrip() for line in text.getvalue().rstrip().splitlines())


def _count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
