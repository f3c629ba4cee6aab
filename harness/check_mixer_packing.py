"""Checks of packed documents: several laid end to end in one row, each as if it were alone.

The documents are of 0, a few, 1, 0, many and 2 tokens; the long one starts in the middle of a chunk, and tokens that
belong to no document follow.
"""

from functools import partial

import torch
from torch import Tensor

from .context import CheckFailure
from .mixer_check import mixer_check
from .mixer_context import BATCH, MixerContext, Probe, expect_same_bits

TAIL = 3
BEFORE = 5  # tokens that every document saw before, where it starts from a state


@mixer_check("each packed document gives the outputs and all the gradients it gives alone")
def packed_documents_equal_separate_ones(context: MixerContext, seq_len: int) -> None:
    for has_state in (False, True):
        run = partial(_differentiate, offsets=documents(seq_len), has_state=has_state)
        context.expect(partial(run, is_packed=True), partial(run, is_packed=False))


@mixer_check("each packed document hands on its own state, an empty one the state it was given")
def packed_states_equal_separate_ones(context: MixerContext, seq_len: int) -> None:
    for has_state in (False, True):
        run = partial(_continue, offsets=documents(seq_len), has_state=has_state)
        context.expect(partial(run, is_packed=True), partial(run, is_packed=False))


@mixer_check("tokens after the last document give zeros, in gradients as well")
def tokens_of_no_document_give_zeros(context: MixerContext, seq_len: int) -> None:
    probe, offsets = context.probe(), documents(seq_len)
    end = offsets[-1]
    hidden = probe.hidden(1, seq_len + TAIL).requires_grad_()
    output = probe.call(hidden, cu_seqlens=_cu_seqlens(probe, offsets))[0]
    gradient = probe.differentiate({"output": output}, {"hidden": hidden})["d hidden"]
    tail = {"output after the documents": output[:, end:], "d hidden after the documents": gradient[:, end:]}
    expect_same_bits(tail, {name: torch.zeros_like(x) for name, x in tail.items()})


@mixer_check("packing needs one row: cu_seqlens beside a larger batch is refused by name")
def packing_a_batch_is_refused(context: MixerContext, seq_len: int) -> None:
    probe = context.probe()
    try:
        probe.call(probe.hidden(BATCH, seq_len + TAIL), cu_seqlens=_cu_seqlens(probe, documents(seq_len)))
    except ValueError as error:
        if "cu_seqlens" in str(error):
            return
        raise CheckFailure(f"expected an error that names cu_seqlens, got: {str(error).splitlines()[0]}") from None
    raise CheckFailure(f"expected a ValueError for cu_seqlens beside a batch of {BATCH}, got an output")


def documents(seq_len: int) -> list[int]:
    """Offsets of six documents in ``seq_len`` tokens; in few tokens some more of them are empty."""
    few = seq_len // 7
    return sorted(min(offset, seq_len) for offset in (0, 0, few, few + 1, few + 1, max(seq_len - 2, 0), seq_len))


def _cu_seqlens(probe: Probe, offsets: list[int]) -> Tensor:
    return torch.tensor(offsets, dtype=torch.int32, device=probe.device)


def _run(
    probe: Probe, hidden: Tensor, offsets: list[int], *, is_packed: bool, has_state: bool
) -> tuple[list[Tensor], list[object]]:
    """Output and state of each document, run in one packed row or each alone."""
    bounds = list(zip(offsets, offsets[1:], strict=False))
    start = probe.run(probe.hidden(len(bounds), BEFORE, draw=1))[1] if has_state else None
    if is_packed:
        output, state = probe.call(hidden, start, cu_seqlens=_cu_seqlens(probe, offsets))
        return [output[:, a:b] for a, b in bounds], [state.select([n]) for n in range(len(bounds))]
    outputs: list[Tensor] = []
    states: list[object] = []
    for n, (a, b) in enumerate(bounds):
        own = None if start is None else start.select([n])
        output, state = (hidden[:, a:b], own) if a == b else probe.call(hidden[:, a:b], own)
        outputs.append(output)
        states.append(state)
    return outputs, states


def _differentiate(probe: Probe, *, offsets: list[int], is_packed: bool, has_state: bool) -> dict[str, Tensor]:
    hidden = probe.hidden(1, offsets[-1] + TAIL).requires_grad_()
    outputs, _ = _run(probe, hidden, offsets, is_packed=is_packed, has_state=has_state)
    named = {f"output of document {n}": output for n, output in enumerate(outputs)}
    return named | probe.differentiate(named, {"hidden": hidden})


def _continue(probe: Probe, *, offsets: list[int], is_packed: bool, has_state: bool) -> dict[str, Tensor]:
    """Three more tokens for each document; one that is empty and had no state has none now."""
    with torch.no_grad():
        hidden, after = probe.hidden(1, offsets[-1] + TAIL), probe.hidden(1, 3, draw=2)
        _, states = _run(probe, hidden, offsets, is_packed=is_packed, has_state=has_state)
        return {f"output after document {n}": probe.run(after, state=state)[0] for n, state in enumerate(states)}
