"""The delta family on a GPU: which kernels run, on which tensors, in which order. Equations stand with the kernels.

    forward     [gate] -> UT transform -> [segments: their maps, join] -> inter-chunk scan [-> outputs]
    backward    [segments: reverse scan from zero, join] -> reverse scan -> gradients

``gate`` is ``cumulative_gate`` for a scalar decay and ``channel_scores`` for a diagonal one. A sequence is partitioned
into segments where one scan a (head, block of V) would leave most of the device idle. Where heads have several blocks
the scan makes states only, and outputs are made from them for all chunks at once, summed over the blocks; states of all
chunks are there for a while then, also without gradients.

With nothing saved, backward makes the UT transform and scans forward once more. Forward and backward neither validate
nor know autograd: ``operators.py`` does. Bytes a micro-step and head, whole sequences, 16-bit, K = V = 128, a = b, no
decay: forward moves 512 + 1152 + 1408 in its three kernels, three times q, k, v and o.
Shapes: B T HQ HA HB HO HV K V, n micro-steps a token, N sequences, C chunk.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from statemix.kernels.launch_config import DeltaConfig, Tiles, check_same_tiles, delta_config, device_arch
from statemix.kernels.normal_form import sum_groups
from statemix.kernels.operands import Decay, Gradients, Saved, ScanOperands
from statemix.kernels.spans import Partition, Spans, ceil_div, partition

from .backward.channel_gradients import channel_gradients
from .backward.delta_gradients import HeadGradients, delta_gradients
from .inter_chunk.delta_outputs import delta_outputs
from .inter_chunk.delta_scan import DeltaScanInputs, inter_chunk_scan
from .inter_chunk.joins import join_maps
from .intra_chunk.channel_scores import channel_scores
from .intra_chunk.ut_transform import ut_transform
from .primitives.cumulative_gate import cumulative_gate


class _Plan(NamedTuple):
    """Tiles, and how the micro-steps are partitioned."""

    config: DeltaConfig
    partition: Partition


class _Transform(NamedTuple):
    """What the scans read besides values, from the UT transform; ``gate``, ``scores``, ``key`` as in ``delta_scan``."""

    query: Tensor
    erase: Tensor
    gate: Tensor | None
    scores: Tensor
    key: Tensor


def forward(operands: ScanOperands, *, scale: float, save: bool) -> tuple[Tensor, Tensor, Saved | None]:
    """Output, final state, and what backward needs besides the operands.

    Args:
        operands: of any strides; what is not contiguous is copied.
        save: keep the UT transform, U and the state at every chunk's start; without, backward makes them again.

    Returns:
        output [B, T, HO, V] in the dtype of q, final_state [N, HV, V, K] float32, saved.
    """
    operands = operands.contiguous()
    plan = _plan(operands)
    transform, L_inv = _transform(operands, plan, scale=scale, needs_L_inv=save)
    output = operands.empty_output()
    if operands.cu_seqlens is not None:
        output.zero_()  # tokens of no document are left out
    maps = _empty_maps(operands, plan)
    if not save:
        return output, _scan_forward(operands, transform, plan, maps, scale=scale, output=output), None
    states, u = _chunk_states(operands, plan), _empty_values(operands)
    final = _scan_forward(
        operands, transform, plan, maps, scale=scale, output=output, states=states, pseudo_values=(L_inv, u)
    )
    return output, final, _saved(operands, plan, transform, states, u, maps)


def backward(
    grad_output: Tensor,
    grad_final: Tensor | None,
    operands: ScanOperands,
    saved: Saved | None,
    *,
    scale: float,
    needs_decay_grad: bool,
) -> Gradients:
    """Gradients of every operand; arguments as ``forward``."""
    operands, grad_output = operands.contiguous(), grad_output.contiguous()
    grad_final = None if grad_final is None else grad_final.contiguous()
    plan = _plan(operands)
    if saved is not None:
        states, u, maps, transform = _saved_transform(saved, operands, plan)
    else:
        states, maps = _chunk_states(operands, plan), _empty_maps(operands, plan)
        u = _empty_values(operands)
        transform, L_inv = _transform(operands, plan, scale=scale, needs_L_inv=True)
        _scan_forward(operands, transform, plan, maps, scale=scale, states=states, pseudo_values=(L_inv, u))
    grad_states = torch.empty_like(states)
    dR = plan.partition.chunks.array_like(u)
    d_initial = _scan_reverse(
        operands, transform, plan, maps, grad_output, grad_final, scale=scale, output=dR, states=grad_states
    )
    tensors = (operands, grad_output, u, dR)
    config, at_borders = plan.config, (states, grad_states, plan.partition.chunks)
    if operands.decay is Decay.DIAGONAL:
        grads = channel_gradients(
            *(*tensors, *at_borders),
            scale=scale,
            tiles=config.channel_gradients,
            score_tiles=config.intra_chunk,
            score_registers=config.max_registers,
        )
    else:
        grads = delta_gradients(
            *(*tensors, transform.gate, *at_borders),
            scale=scale,
            tiles=config.gradients,
            score_tiles=config.intra_chunk,
            score_registers=config.max_registers,
            needs_gate=needs_decay_grad and transform.gate is not None,
        )
    return _gradients(grads if needs_decay_grad else grads._replace(gate=None), operands, d_initial)


def _plan(operands: ScanOperands) -> _Plan:
    (batch, length, _, value_dim), heads = operands.v.shape, operands.num_heads
    q = operands.q
    config = delta_config(device_arch(q.device), q.shape[-1], value_dim, q.dtype)
    parts = partition(
        batch,
        length,
        None if operands.cu_seqlens is None else operands.cu_seqlens * operands.num_steps,
        heads * ceil_div(value_dim, config.scan.block),
        config.partition_rule,
    )
    return _Plan(config, parts)


def _segments(plan: _Plan) -> tuple[int, int]:
    """Their number and the micro-steps of one; 0 and 0 where sequences stay whole."""
    segments = plan.partition.segments
    return (0, 0) if segments is None else (segments.count, segments.length)


def _chunk_states(operands: ScanOperands, plan: _Plan) -> Tensor:
    count, heads = plan.partition.chunks.count, operands.num_heads
    return operands.v.new_empty(count, heads, operands.q.shape[-1], operands.v.shape[-1])


def _empty_values(operands: ScanOperands) -> Tensor:
    """[B, T n, HV, V], unwritten."""
    batch, length, _, value_dim = operands.v.shape
    return operands.v.new_empty(batch, length, operands.num_heads, value_dim)


def _empty_maps(operands: ScanOperands, plan: _Plan) -> Tensor:
    """P of every segment, unwritten; none where sequences stay whole."""
    heads, key_dim = operands.num_heads, operands.q.shape[-1]
    return operands.q.new_empty(_segments(plan)[0], heads, key_dim, key_dim, dtype=torch.float32)


def _transform(
    operands: ScanOperands, plan: _Plan, *, scale: float, needs_L_inv: bool
) -> tuple[_Transform, Tensor | None]:
    """What the scans read, and L^-1 where it is asked for."""
    query, erase, gate, channels = operands.q, _erase_directions(operands), None, None
    if operands.decay is Decay.DIAGONAL:
        channels = channel_scores(operands, plan.partition.chunks, scale=scale, tiles=plan.config.channel_scores)
        assert channels.a_from_start is not None
        query, erase, gate = channels.q_from_start, channels.a_from_start, channels.total
    elif operands.log_decay is not None:
        gate = cumulative_gate(operands.log_decay, plan.partition.chunks, num_steps=operands.num_steps)
    ut = ut_transform(
        *(operands, channels, None if channels is not None else gate, plan.partition.chunks),
        scale=scale,
        tiles=plan.config.intra_chunk,
        max_registers=plan.config.max_registers,
        needs_L_inv=needs_L_inv,
    )
    return _Transform(query, erase, gate, ut.scores, ut.key), ut.L_inv


def _saved(
    operands: ScanOperands, plan: _Plan, transform: _Transform, states: Tensor, u: Tensor, maps: Tensor
) -> Saved:
    """Of ``transform`` what is not an operand."""
    decayed = {"query": transform.query, "erase": transform.erase} if operands.decay is Decay.DIAGONAL else {}
    shared = {"scores": transform.scores, "key": transform.key, "gate": transform.gate}
    return Saved(states, u, maps, segment_length=_segments(plan)[1], **decayed, **shared)


def _saved_transform(saved: Saved, operands: ScanOperands, plan: _Plan) -> tuple[Tensor, Tensor, Tensor, _Transform]:
    """States, pseudo-values, maps and UT transform that a forward pass saved for this plan."""
    states, u, maps, scores, query, erase, key, gate, length = saved
    assert u is not None and maps is not None and scores is not None and key is not None
    check_same_tiles(
        (states.shape[0], scores.shape[-1], maps.shape[0], length),
        (plan.partition.chunks.count, plan.config.chunk_size, *_segments(plan)),
    )
    query = operands.q if query is None else query
    erase = _erase_directions(operands) if erase is None else erase
    return states, u, maps, _Transform(query, erase, gate, scores, key)


def _erase_directions(operands: ScanOperands) -> Tensor:
    return operands.b if operands.a is None else operands.a


def _scan_inputs(operands: ScanOperands, transform: _Transform, scale: float) -> DeltaScanInputs:
    is_diagonal = operands.decay is Decay.DIAGONAL
    return DeltaScanInputs(
        *(transform.query, transform.erase, transform.key, operands.v, transform.scores),
        None if is_diagonal else operands.erase_beta,
        *(operands.write, transform.gate, operands.initial_state),
        operands.decay.value,
        operands.reads_before_decay,
        operands.num_steps,
        scale,
    )


def _scan_forward(
    operands: ScanOperands,
    transform: _Transform,
    plan: _Plan,
    maps: Tensor,
    *,
    scale: float,
    output: Tensor | None = None,
    states: Tensor | None = None,
    pseudo_values: tuple[Tensor | None, Tensor] | None = None,
) -> Tensor:
    """Scan every sequence, in segments where the plan says so, filling ``maps``; returns the final state."""
    config, chunks, final = plan.config, plan.partition.chunks, operands.empty_state()
    inputs, spans, end = _joined(_scan_inputs(operands, transform, scale), plan, final, maps, config.summary)
    if operands.blocks > 1:
        states = _chunk_states(operands, plan) if states is None else states
        inter_chunk_scan(inputs, spans, tiles=config.summary, states=states, final=end)
        delta_outputs(inputs, states, chunks, tiles=config.outputs, output=output, pseudo_values=pseudo_values)
    else:
        scan = partial(inter_chunk_scan, tiles=config.scan if states is None else config.saving)
        scan(inputs, spans, output=output, states=states, final=end, pseudo_values=pseudo_values)
    return final


def _scan_reverse(
    operands: ScanOperands,
    transform: _Transform,
    plan: _Plan,
    maps: Tensor,
    grad_output: Tensor,
    grad_final: Tensor | None,
    *,
    scale: float,
    output: Tensor,
    states: Tensor,
) -> Tensor:
    """dR and dS at the end of every chunk; returns the gradient of the initial state."""
    inputs = _scan_inputs(operands, transform, scale)._replace(value=grad_output, write=None, initial=grad_final)
    tiles, d_initial = plan.config.reverse, operands.empty_state()
    inputs, spans, end = _joined(inputs, plan, d_initial, maps, tiles, reverse=True)
    inter_chunk_scan(inputs, spans, tiles=tiles, output=output, states=states, final=end, reverse=True)
    return d_initial


def _joined(
    inputs: DeltaScanInputs, plan: _Plan, final: Tensor, maps: Tensor, tiles: Tiles, *, reverse: bool = False
) -> tuple[DeltaScanInputs, Spans, Tensor | None]:
    """Inputs and spans of the scan, and where its end goes: whole sequences, or segments from their true starts.

    Segments are scanned from zero for that, and joined, which fills ``final``; forward fills ``maps`` too.
    """
    segments = plan.partition.segments
    if segments is None:
        return inputs, plan.partition.sequences, final
    updates, from_zero = final.new_empty(segments.count, *final.shape[1:]), inputs._replace(initial=None)
    filled = None if reverse else maps
    inter_chunk_scan(from_zero, segments, tiles=tiles, final=updates, maps=filled, reverse=reverse)
    join_maps(inputs.initial, updates, maps, final, segments, reverse=reverse)
    return inputs._replace(initial=updates), segments, None


def _gradients(grads: HeadGradients, operands: ScanOperands, d_initial: Tensor) -> Gradients:
    """Sums over the heads that share a key, over the blocks that share a value, and over tiles of K."""
    beta, gate = grads.erase_beta, grads.gate
    if beta is not None and operands.erase_beta is not None:
        beta = beta.sum(0).to(operands.erase_beta.dtype).view(operands.erase_beta.shape)
    if gate is not None and operands.log_decay is not None:
        gate = gate.sum(0).view(operands.log_decay.shape) if gate.ndim == 3 else gate
        gate = gate.to(operands.log_decay.dtype)
    return Gradients(
        sum_groups(grads.q, operands.q.shape),
        None if grads.a is None or operands.a is None else sum_groups(grads.a, operands.a.shape),
        sum_groups(grads.b, operands.b.shape),
        sum_groups(grads.v, operands.v.shape),
        beta,
        grads.write,
        gate,
        d_initial,
    )
