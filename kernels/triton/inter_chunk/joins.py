"""Segments of a sequence, scanned side by side from zero, joined: the state that each one truly starts from.

    additive   S[s + 1] = S[s] decay[s] + H[s]                  delta   S[s + 1] = S[s] P[s] + H[s]

H is a segment's own update, P the map of its erase and write pairs with their decay, [K, K]. In reverse dS goes from
the last segment to the first, through P^T.
"""

import triton
import triton.language as tl
from torch import Tensor

from statemix.kernels.launch import launch
from statemix.kernels.launch_config import device_arch, products_in
from statemix.kernels.spans import Spans, ceil_div, power_of_2_from
from statemix.kernels.triton.primitives.gates import DIAGONAL, NO_DECAY


@triton.jit(do_not_specialize=["spans_per_seq"])
def _join_segments_kernel(
    initial_ptr,  # [N, HV, V, K] float32, or None
    updates_ptr,  # [spans, HV, V, K] float32: updates from zero, replaced by the state each segment starts from
    decay_ptr,  # [spans, HV] or [spans, HV, K] float32, or None
    final_ptr,  # [N, HV, V, K] float32
    offsets_ptr,  # [N + 1] segments before each document, or None for a batch
    spans_per_seq,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    DECAY: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """S[s + 1] = S[s] decay[s] + H[s], over the segments of one sequence."""
    BLOCKS: tl.constexpr = (K * V + BLOCK - 1) // BLOCK
    pid = tl.program_id(0)
    head = ((pid // BLOCKS) % HV).to(tl.int64)
    sequence = (pid // (BLOCKS * HV)).to(tl.int64)
    elements = (pid % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    mask = elements < K * V
    if offsets_ptr is not None:
        first, last = tl.load(offsets_ptr + sequence).to(tl.int64), tl.load(offsets_ptr + sequence + 1).to(tl.int64)
    else:
        first, last = sequence * spans_per_seq, (sequence + 1) * spans_per_seq
    offset = (sequence * HV + head) * K * V + elements
    if initial_ptr is not None:
        state = tl.load(initial_ptr + offset, mask=mask, other=0.0)
    else:
        state = tl.zeros([BLOCK], dtype=tl.float32)
    count = (last - first).to(tl.int32)
    step = 1
    segment = first
    if REVERSE:
        step = -1
        segment = last - 1
    update = tl.load(updates_ptr + (segment * HV + head) * K * V + elements, mask=mask & (count > 0), other=0.0)
    for i in range(count):
        place = updates_ptr + (segment * HV + head) * K * V + elements
        # the next update is asked for before this one's place is overwritten: a load does not pass a store by itself
        following = tl.load(place + step * HV * K * V, mask=mask & (i + 1 < count), other=0.0)
        if DECAY == DIAGONAL:
            decay = tl.load(decay_ptr + (segment * HV + head) * K + elements % K, mask=mask, other=0.0)
        elif DECAY != NO_DECAY:
            decay = tl.load(decay_ptr + segment * HV + head)
        else:
            decay = 1.0
        tl.store(place, state, mask=mask)
        state = state * decay + update
        update = following
        segment += step
    tl.store(final_ptr + offset, state, mask=mask)


def join_segments(
    initial: Tensor | None,
    updates: Tensor,
    decay: Tensor | None,
    final: Tensor,
    spans: Spans,
    *,
    kind: int,
    reverse: bool,
) -> None:
    """Turn the updates of segments into the states they start from, in place, and fill ``final``."""
    num_sequences, heads, value_dim, key_dim = final.shape
    block = 512
    launch(
        _join_segments_kernel,
        (num_sequences * heads * ceil_div(key_dim * value_dim, block),),
        (initial, updates, decay, final, spans.offsets, spans.per_sequence),
        {"HV": heads, "K": key_dim, "V": value_dim, "BLOCK": block, "DECAY": kind, "REVERSE": reverse},
        num_warps=4,
        num_stages=1,
    )


@triton.jit(do_not_specialize=["spans_per_seq"])
def _join_maps_kernel(
    initial_ptr,  # [N, HV, V, K] float32, or None
    updates_ptr,  # H, [spans, HV, V, K] float32, replaced by the state each segment starts from
    maps_ptr,  # P, [spans, HV, K, K] float32
    final_ptr,  # [N, HV, V, K] float32
    offsets_ptr,  # [N + 1] segments before each document, or None for a batch
    spans_per_seq,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
    REVERSE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """S[s + 1] = S[s] P[s] + H[s] over the segments of one sequence; in reverse dS[s - 1] = dS[s] P[s]^T + H[s]."""
    BLOCKS_V: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    pid = tl.program_id(0)
    head = ((pid // BLOCKS_V) % HV).to(tl.int64)
    sequence = (pid // (BLOCKS_V * HV)).to(tl.int64)
    if offsets_ptr is not None:
        first, last = tl.load(offsets_ptr + sequence).to(tl.int64), tl.load(offsets_ptr + sequence + 1).to(tl.int64)
    else:
        first, last = sequence * spans_per_seq, (sequence + 1) * spans_per_seq
    values = (pid % BLOCKS_V) * BLOCK_V + tl.arange(0, BLOCK_V)
    columns = tl.arange(0, BLOCK_K)
    mask = (values < V)[:, None] & (columns < K)[None, :]
    offset = values[:, None] * K + columns[None, :]
    if initial_ptr is not None:
        state = tl.load(initial_ptr + (sequence * HV + head) * K * V + offset, mask=mask, other=0.0)
    else:
        state = tl.zeros([BLOCK_V, BLOCK_K], dtype=tl.float32)
    for i in range((last - first).to(tl.int32)):
        segment = first + i
        if REVERSE:
            segment = last - 1 - i
        update_ptr = updates_ptr + (segment * HV + head) * K * V
        map_ptr = maps_ptr + (segment * HV + head) * K * K
        update = tl.load(update_ptr + offset, mask=mask, other=0.0)
        tl.debug_barrier()
        tl.store(update_ptr + offset, state, mask=mask)
        tl.debug_barrier()  # the product reads the state back by columns
        for block in range((K + BLOCK - 1) // BLOCK):
            inner = block * BLOCK + tl.arange(0, BLOCK)
            part_ptr = update_ptr + values[:, None] * K + inner[None, :]
            part = tl.load(part_ptr, mask=(values < V)[:, None] & (inner < K)[None, :], other=0.0)
            if REVERSE:
                place = map_ptr + columns[None, :] * K + inner[:, None]
            else:
                place = map_ptr + inner[:, None] * K + columns[None, :]
            matrix = tl.load(place, mask=(inner < K)[:, None] & (columns < K)[None, :], other=0.0)
            update = tl.dot(part, matrix, update, input_precision=PRECISION)
        state = update
    tl.store(final_ptr + (sequence * HV + head) * K * V + offset, state, mask=mask)


def join_maps(
    initial: Tensor | None, updates: Tensor, maps: Tensor, final: Tensor, spans: Spans, *, reverse: bool
) -> None:
    """Turn the updates of segments into the states they start from, in place, and fill ``final``."""
    num_sequences, heads, value_dim, key_dim = final.shape
    block_v, arch = 16, device_arch(final.device)
    prefetches = key_dim <= 128 and arch != "gfx942"  # wider maps, or 64 KB of shared memory, hold one load
    launch(
        _join_maps_kernel,
        (num_sequences * heads * ceil_div(value_dim, block_v),),
        (initial, updates, maps, final, spans.offsets, spans.per_sequence),
        {
            "HV": heads,
            "K": key_dim,
            "V": value_dim,
            "BLOCK_V": block_v,
            "BLOCK_K": max(16, power_of_2_from(key_dim)),
            "BLOCK": 32,
            "REVERSE": reverse,
            "PRECISION": products_in(final.dtype, arch),
        },
        num_warps=8 if prefetches else 4,
        num_stages=3 if prefetches else 1,
    )
