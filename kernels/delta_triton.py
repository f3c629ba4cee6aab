"""The delta family on a GPU: which kernels run, on which tensors, in which order. Equations stand with the kernels.

    forward     [gate] -> inverse -> products -> [segments: their maps, join] -> walk [-> outputs]
    backward    [segments: reverse walk from zero, join] -> reverse walk -> gradients

``gate`` is ``cumulative_gate`` for a scalar decay and ``channel_erasures`` for a diagonal one. A sequence is cut into
segments where one walk a (head, block of V) would leave most of the device idle. Where heads have several blocks the
walk makes states only, and outputs are made from them for all chunks at once, summed over the blocks; states of all
chunks are there for a while then, also without gradients.

With nothing saved, backward makes the products and walks forward once more. Forward and backward neither validate nor
know autograd: ``operators.py`` does. Bytes a row and head, uncut, 16-bit, K = V = 128, a = b, no decay: forward moves
512 + 1152 + 1408 in its three kernels, three times q, k, v and o.
Shapes: B T HQ HA HB HO HV K V, n micro-steps a token, R = T n rows, N sequences, C chunk.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .launch_config import DeltaConfig, check_same_tiles, delta_config, device_arch
from .normal_form import sum_groups
from .operands import Decay, Gradients, Saved, ScanOperands
from .spans import Partition, ceil_div, partition
from .triton.backward.channel_gradients import channel_row_gradients
from .triton.backward.delta_gradients import RowGradients, delta_gradients
from .triton.inter_chunk.delta_outputs import delta_outputs
from .triton.inter_chunk.delta_scan import DeltaWalkInputs, delta_walk
from .triton.inter_chunk.joins import join_maps
from .triton.intra_chunk.channel_scores import channel_erasures
from .triton.intra_chunk.ut_transform import inverse_products
from .triton.primitives.cumulative_gate import cumulative_gate


class _Plan(NamedTuple):
    """Tiles, and how the rows are cut."""

    config: DeltaConfig
    partition: Partition


class _Products(NamedTuple):
    """What the walks read besides values; ``gate``, ``pairs``, ``key`` as in ``delta_walk_triton``."""

    query: Tensor
    eraser: Tensor
    gate: Tensor | None
    pairs: Tensor
    key: Tensor


def forward(operands: ScanOperands, *, scale: float, save: bool) -> tuple[Tensor, Tensor, Saved | None]:
    """Output, final state, and what backward needs besides the operands.

    Args:
        operands: of any strides; what is not contiguous is copied.
        save: keep products, corrected values and the state at every chunk's start; without, backward makes them again.

    Returns:
        output [B, T, HO, V] in the dtype of q, final_state [N, HV, V, K] float32, saved.
    """
    operands = operands.contiguous()
    plan = _plan(operands)
    products, inverse = _products(operands, plan, scale=scale, needs_inverse=save)
    output = operands.empty_output()
    if operands.cu_seqlens is not None:
        output.zero_()  # rows of no document are left out
    maps = _empty_maps(operands, plan)
    if not save:
        return output, _walk_forward(operands, products, plan, maps, scale=scale, output=output), None
    states, corrected = _chunk_states(operands, plan), _empty_values(operands)
    final = _walk_forward(
        operands, products, plan, maps, scale=scale, output=output, states=states, corrected=(inverse, corrected)
    )
    return output, final, _saved(operands, plan, products, states, corrected, maps)


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
        states, corrected, maps, products = _products_of(saved, operands, plan)
    else:
        states, maps = _chunk_states(operands, plan), _empty_maps(operands, plan)
        corrected = _empty_values(operands)
        products, inverse = _products(operands, plan, scale=scale, needs_inverse=True)
        _walk_forward(operands, products, plan, maps, scale=scale, states=states, corrected=(inverse, corrected))
    grad_states = torch.empty_like(states)
    residual = plan.partition.chunks.rows_like(corrected)
    d_initial = _walk_reverse(
        operands, products, plan, maps, grad_output, grad_final, scale=scale, output=residual, states=grad_states
    )
    tensors = (operands, grad_output, corrected, residual)
    config, at_borders = plan.config, (states, grad_states, plan.partition.chunks)
    if operands.decay is Decay.DIAGONAL:
        grads = channel_row_gradients(
            *(*tensors, *at_borders),
            scale=scale,
            tiles=config.channel_gradients,
            pair_tiles=config.intra_chunk,
            pair_registers=config.max_registers,
        )
    else:
        grads = delta_gradients(
            *(*tensors, products.gate, *at_borders),
            scale=scale,
            tiles=config.gradients,
            pair_tiles=config.intra_chunk,
            pair_registers=config.max_registers,
            needs_gate=needs_decay_grad and products.gate is not None,
        )
    return _gradients(grads if needs_decay_grad else grads._replace(gate=None), operands, d_initial)


def _plan(operands: ScanOperands) -> _Plan:
    (batch, rows, _, value_dim), heads = operands.v.shape, operands.num_heads
    q = operands.q
    config = delta_config(device_arch(q.device), q.shape[-1], value_dim, q.dtype)
    parts = partition(
        batch,
        rows,
        None if operands.cu_seqlens is None else operands.cu_seqlens * operands.num_steps,
        heads * ceil_div(value_dim, config.scan.block),
        config.partition_rule,
    )
    return _Plan(config, parts)


def _segments(plan: _Plan) -> tuple[int, int]:
    """Their number and the rows of one; 0 and 0 where sequences stay whole."""
    segments = plan.partition.segments
    return (0, 0) if segments is None else (segments.count, segments.length)


def _chunk_states(operands: ScanOperands, plan: _Plan) -> Tensor:
    count, heads = plan.partition.chunks.count, operands.num_heads
    return operands.v.new_empty(count, heads, operands.q.shape[-1], operands.v.shape[-1])


def _empty_values(operands: ScanOperands) -> Tensor:
    """[B, R, HV, V], unwritten."""
    batch, rows, _, value_dim = operands.v.shape
    return operands.v.new_empty(batch, rows, operands.num_heads, value_dim)


def _empty_maps(operands: ScanOperands, plan: _Plan) -> Tensor:
    """P of every segment, unwritten; none where sequences stay whole."""
    heads, key_dim = operands.num_heads, operands.q.shape[-1]
    return operands.q.new_empty(_segments(plan)[0], heads, key_dim, key_dim, dtype=torch.float32)


def _products(
    operands: ScanOperands, plan: _Plan, *, scale: float, needs_inverse: bool
) -> tuple[_Products, Tensor | None]:
    """What the walks read, and T where it is asked for."""
    query, eraser, gate, channels = operands.q, _read_vectors(operands), None, None
    if operands.decay is Decay.DIAGONAL:
        channels = channel_erasures(operands, plan.partition.chunks, scale=scale, tiles=plan.config.channel_scores)
        query, eraser, gate = channels.query, channels.eraser, channels.total
    elif operands.log_decay is not None:
        gate = cumulative_gate(operands.log_decay, plan.partition.chunks, num_steps=operands.num_steps)
    made = inverse_products(
        *(operands, channels, None if channels is not None else gate, plan.partition.chunks),
        scale=scale,
        tiles=plan.config.intra_chunk,
        max_registers=plan.config.max_registers,
        needs_inverse=needs_inverse,
    )
    return _Products(query, eraser, gate, made.pairs, made.key), made.inverse


def _saved(
    operands: ScanOperands, plan: _Plan, products: _Products, states: Tensor, corrected: Tensor, maps: Tensor
) -> Saved:
    """Of ``products`` what is not an operand."""
    own = {"query": products.query, "eraser": products.eraser} if operands.decay is Decay.DIAGONAL else {}
    rest = {"pairs": products.pairs, "key": products.key, "gate": products.gate}
    return Saved(states, corrected, maps, segment_length=_segments(plan)[1], **own, **rest)


def _products_of(saved: Saved, operands: ScanOperands, plan: _Plan) -> tuple[Tensor, Tensor, Tensor, _Products]:
    """States, corrected values, maps and products that a forward pass saved for this plan."""
    states, corrected, maps, pairs, query, eraser, key, gate, length = saved
    assert corrected is not None and maps is not None and pairs is not None and key is not None
    check_same_tiles(
        (states.shape[0], pairs.shape[-1], maps.shape[0], length),
        (plan.partition.chunks.count, plan.config.chunk_size, *_segments(plan)),
    )
    query = operands.q if query is None else query
    eraser = _read_vectors(operands) if eraser is None else eraser
    return states, corrected, maps, _Products(query, eraser, gate, pairs, key)


def _read_vectors(operands: ScanOperands) -> Tensor:
    return operands.b if operands.a is None else operands.a


def _walk_inputs(operands: ScanOperands, products: _Products, scale: float) -> DeltaWalkInputs:
    is_diagonal = operands.decay is Decay.DIAGONAL
    return DeltaWalkInputs(
        *(products.query, products.eraser, products.key, operands.v, products.pairs),
        None if is_diagonal else operands.erase_beta,
        *(operands.write, products.gate, operands.initial_state),
        operands.decay.value,
        operands.reads_before_decay,
        operands.num_steps,
        scale,
    )


def _walk_forward(
    operands: ScanOperands,
    products: _Products,
    plan: _Plan,
    maps: Tensor,
    *,
    scale: float,
    output: Tensor | None = None,
    states: Tensor | None = None,
    corrected: tuple[Tensor | None, Tensor] | None = None,
) -> Tensor:
    """Walk every sequence, in segments where the plan says so, filling ``maps``; returns the final state."""
    inputs = _walk_inputs(operands, products, scale)
    final, spans, end = operands.empty_state(), plan.partition.sequences, None
    if plan.partition.segments is None:
        end = final
    else:
        spans = plan.partition.segments
        updates = final.new_empty(spans.count, *final.shape[1:])
        delta_walk(inputs._replace(initial=None), spans, tiles=plan.config.summary, final=updates, maps=maps)
        join_maps(operands.initial_state, updates, maps, final, spans, reverse=False)
        inputs = inputs._replace(initial=updates)
    if operands.blocks > 1:
        states = _chunk_states(operands, plan) if states is None else states
        delta_walk(inputs, spans, tiles=plan.config.summary, states=states, final=end)
        tiles = plan.config.outputs
        delta_outputs(inputs, states, plan.partition.chunks, tiles=tiles, output=output, corrected=corrected)
    else:
        tiles = plan.config.scan if states is None else plan.config.saving
        delta_walk(inputs, spans, tiles=tiles, output=output, states=states, final=end, corrected=corrected)
    return final


def _walk_reverse(
    operands: ScanOperands,
    products: _Products,
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
    inputs = _walk_inputs(operands, products, scale)._replace(value=grad_output, weight=None, initial=grad_final)
    d_initial, spans, end = operands.empty_state(), plan.partition.sequences, None
    if plan.partition.segments is None:
        end = d_initial
    else:
        spans = plan.partition.segments
        updates = d_initial.new_empty(spans.count, *d_initial.shape[1:])
        start = inputs._replace(initial=None)
        delta_walk(start, spans, tiles=plan.config.reverse, final=updates, reverse=True)
        join_maps(grad_final, updates, maps, d_initial, spans, reverse=True)
        inputs = inputs._replace(initial=updates)
    delta_walk(inputs, spans, tiles=plan.config.reverse, output=output, states=states, final=end, reverse=True)
    return d_initial


def _gradients(grads: RowGradients, operands: ScanOperands, d_initial: Tensor) -> Gradients:
    """Sums over the heads that share a key, over the blocks that share a value, and over tiles of K."""
    beta, gate = grads.rate, grads.gate
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
        grads.weight,
        gate,
        d_initial,
    )
