"""Checks of packed documents: several laid end to end in one sequence, each as if it were alone.

The documents are of 0, a few, 1, 0, many and 2 tokens; the long one starts in the middle of a chunk, and tokens that
belong to no document follow.
"""

from functools import partial

import torch
from torch import Tensor

from statemix.harness.check import CheckFailure, check

from .checked_mixer import BATCH, CheckedMixer, Probe
from .states import select

TAIL = 3
BEFORE = 5  # tokens that every document saw before, where it starts from a state


@check("each packed document gives the outputs and all the gradients it gives alone", needs=["packs"])
def packed_documents_equal_separate_ones(mixer: CheckedMixer) -> None:
    for has_state in (False, True):
        run = partial(_differentiate, offsets=documents(mixer.seq_len), has_state=has_state)
        mixer.expect_equivalent(partial(run, is_packed=True), partial(run, is_packed=False))


@check("each packed document hands on its own state, an empty one the state it was given", needs=["packs"])
def packed_states_equal_separate_ones(mixer: CheckedMixer) -> None:
    for has_state in (False, True):
        run = partial(_continue, offsets=documents(mixer.seq_len), has_state=has_state)
        mixer.expect_equivalent(partial(run, is_packed=True), partial(run, is_packed=False))


@check("tokens after the last document give zeros, in gradients as well", needs=["packs"])
def tokens_of_no_document_give_zeros(mixer: CheckedMixer) -> None:
    probe, offsets = mixer.probe(), documents(mixer.seq_len)
    end = offsets[-1]
    hidden = probe.hidden(1, end + TAIL).requires_grad_()
    output = probe.call(hidden, cu_seqlens=_cu_seqlens(probe, offsets))[0]
    gradient = probe.differentiate({"output": output}, {"hidden": hidden})["d hidden"]
    tail = {"output after the documents": output[:, end:], "d hidden after the documents": gradient[:, end:]}
    mixer.expect_equal(tail, {name: torch.zeros_like(x) for name, x in tail.items()})


@check("packing needs one sequence: cu_seqlens beside a larger batch is refused by name", needs=["packs"])
def packing_a_batch_is_refused(mixer: CheckedMixer) -> None:
    probe = mixer.probe()
    try:
        _call_packed(probe, BATCH)
    except ValueError as error:
        if "cu_seqlens" in str(error):
            return
        raise CheckFailure(f"expected an error that names cu_seqlens, got: {str(error).splitlines()[0]}") from None
    raise CheckFailure(f"expected a ValueError for cu_seqlens beside a batch of {BATCH}, got an output")


@check(
    "a mixer that declares no packing refuses cu_seqlens: documents must not leak unnoticed", needs=["refuses_packing"]
)
def packing_is_refused(mixer: CheckedMixer) -> None:
    try:
        _call_packed(mixer.probe(), 1)
    except Exception:
        return
    raise CheckFailure("expected an error for cu_seqlens, which packs=False declares unsupported, got an output")


def _call_packed(probe: Probe, batch: int) -> None:
    probe.call(probe.hidden(batch, probe.seq_len + TAIL), cu_seqlens=_cu_seqlens(probe, documents(probe.seq_len)))


def documents(seq_len: int) -> list[int]:
    """Offsets of six documents in ``seq_len`` tokens; in few tokens some more of them are empty."""
    few = seq_len // 7
    return sorted(min(offset, seq_len) for offset in (0, 0, few, few + 1, few + 1, max(seq_len - 2, 0), seq_len))


def _cu_seqlens(probe: Probe, offsets: list[int]) -> Tensor:
    return torch.tensor(offsets, dtype=torch.int32, device=probe.device)


def _run(
    probe: Probe, hidden: Tensor, offsets: list[int], *, is_packed: bool, has_state: bool
) -> tuple[list[Tensor], list[object]]:
    """Output and state of each document, run packed in one sequence or each alone."""
    bounds = list(zip(offsets, offsets[1:], strict=False))
    start = probe.run(probe.hidden(len(bounds), BEFORE, draw=1))[1] if has_state else None
    if is_packed:
        output, state = probe.call(hidden, start, cu_seqlens=_cu_seqlens(probe, offsets))
        return [output[:, a:b] for a, b in bounds], [select(state, [n]) for n in range(len(bounds))]
    outputs: list[Tensor] = []
    states: list[object] = []
    for n, (a, b) in enumerate(bounds):
        own = None if start is None else select(start, [n])
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
