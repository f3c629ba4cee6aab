"""The delta family on a GPU: which kernels run, on which tensors, in which order. Equations stand with the kernels.

    forward     [gate] -> inverse -> products -> [segments: their maps, join] -> walk [-> outputs]
    backward    [segments: reverse walk from zero, join] -> reverse walk -> gradients

``gate`` is ``cumulative_gate`` for a scalar decay and ``channel_erasures`` for a diagonal one. A sequence is cut into
segments where one walk a (head, block of V) would leave most of the device idle. Where heads have several blocks the
walk makes states only, and outputs are made from them for all chunks at once, summed over the blocks; states of all
chunks are there for a while then, also without gradients.

With nothing saved, backward makes the products and walks forward once more. Forward and backward neither validate nor
know autograd: ``delta_op.py`` does. Bytes a row and head, uncut, 16-bit, K = V = 128, a = b, no decay: forward moves
512 + 1152 + 1408 in its three kernels, three times q, k, v and o.
Shapes: B T HQ HA HB HO HV K V, n micro-steps a token, R = T n rows, N sequences, C chunk.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .channel_gradients_triton import channel_row_gradients
from .channel_pairs_triton import channel_erasures
from .delta_gradients_triton import RowGradients, delta_gradients
from .delta_operands import DeltaGradients, DeltaOperands
from .delta_outputs_triton import delta_outputs
from .delta_walk_triton import DeltaWalkInputs, delta_walk, join_maps
from .gate_triton import cumulative_gate
from .inverse_triton import inverse_products
from .launch_config import DeltaConfig, check_same_tiles, delta_config, device_family
from .normal_form import sum_groups
from .spans import Cut, ceil_div, cut_rows
from .tile_triton import decay_kind


class _Plan(NamedTuple):
    """Tiles, and how the rows are cut."""

    config: DeltaConfig
    cut: Cut


class _Products(NamedTuple):
    """What the walks read besides values; ``gate``, ``pairs``, ``key`` as in ``delta_walk_triton``."""

    query: Tensor
    eraser: Tensor
    gate: Tensor | None
    pairs: Tensor
    key: Tensor


def delta_forward(operands: DeltaOperands, *, scale: float, save: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Output, final state, and what backward needs besides the inputs.

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
        return output, _walk_forward(operands, products, plan, maps, scale=scale, output=output), []
    states, corrected = _chunk_states(operands, plan), _empty_values(operands)
    final = _walk_forward(
        operands, products, plan, maps, scale=scale, output=output, states=states, corrected=(inverse, corrected)
    )
    cut = operands.q.new_empty(_segments(plan)[1], 0)  # says how long segments are, which their number need not
    return output, final, [states, corrected, maps, cut, *_own_tensors(products, operands)]


def delta_backward(
    grad_output: Tensor,
    grad_final: Tensor | None,
    operands: DeltaOperands,
    saved: list[Tensor],
    *,
    scale: float,
    needs_decay_grad: bool,
) -> DeltaGradients:
    """Gradients of every operand; arguments as ``delta_forward``."""
    operands, grad_output = operands.contiguous(), grad_output.contiguous()
    grad_final = None if grad_final is None else grad_final.contiguous()
    plan = _plan(operands)
    if saved:
        states, corrected, maps, cut, pairs, *own = saved
        check_same_tiles(
            (states.shape[0], pairs.shape[-1], maps.shape[0], cut.shape[0]),
            (plan.cut.chunks.count, plan.config.chunk_size, *_segments(plan)),
        )
        products = _saved_products(operands, [pairs, *own])
    else:
        states, maps = _chunk_states(operands, plan), _empty_maps(operands, plan)
        corrected = _empty_values(operands)
        products, inverse = _products(operands, plan, scale=scale, needs_inverse=True)
        _walk_forward(operands, products, plan, maps, scale=scale, states=states, corrected=(inverse, corrected))
    grad_states = torch.empty_like(states)
    residual = plan.cut.chunks.rows_like(corrected)
    d_initial = _walk_reverse(
        operands, products, plan, maps, grad_output, grad_final, scale=scale, output=residual, states=grad_states
    )
    given = (operands, grad_output, corrected, residual)
    config, at_borders = plan.config, (states, grad_states, plan.cut.chunks)
    if _is_diagonal(operands):
        grads = channel_row_gradients(
            *(*given, *at_borders),
            scale=scale,
            tiles=config.channel_gradients,
            pair_tiles=config.products,
            pair_registers=config.product_registers,
        )
    else:
        grads = delta_gradients(
            *(*given, products.gate, *at_borders),
            scale=scale,
            tiles=config.gradients,
            pair_tiles=config.products,
            pair_registers=config.product_registers,
            needs_gate=needs_decay_grad and products.gate is not None,
        )
    return _gradients(grads if needs_decay_grad else grads._replace(gate=None), operands, d_initial)


def _plan(operands: DeltaOperands) -> _Plan:
    (batch, rows, _, value_dim), heads = operands.v.shape, operands.num_heads
    q = operands.q
    config = delta_config(device_family(q.device), q.shape[-1], value_dim, q.dtype)
    cut = cut_rows(
        batch,
        rows,
        None if operands.cu_seqlens is None else operands.cu_seqlens * operands.num_steps,
        heads * ceil_div(value_dim, config.walk.block),
        config.cut_rule,
    )
    return _Plan(config, cut)


def _segments(plan: _Plan) -> tuple[int, int]:
    """Their number and the rows of one; 0 and 0 where sequences stay whole."""
    segments = plan.cut.segments
    return (0, 0) if segments is None else (segments.count, segments.length)


def _is_diagonal(operands: DeltaOperands) -> bool:
    return operands.log_decay is not None and operands.log_decay.ndim == 4


def _chunk_states(operands: DeltaOperands, plan: _Plan) -> Tensor:
    count, heads = plan.cut.chunks.count, operands.num_heads
    return operands.v.new_empty(count, heads, operands.q.shape[-1], operands.v.shape[-1])


def _empty_values(operands: DeltaOperands) -> Tensor:
    """[B, R, HV, V], unwritten."""
    batch, rows, _, value_dim = operands.v.shape
    return operands.v.new_empty(batch, rows, operands.num_heads, value_dim)


def _empty_maps(operands: DeltaOperands, plan: _Plan) -> Tensor:
    """P of every segment, unwritten; none where sequences stay whole."""
    heads, key_dim = operands.num_heads, operands.q.shape[-1]
    return operands.q.new_empty(_segments(plan)[0], heads, key_dim, key_dim, dtype=torch.float32)


def _products(
    operands: DeltaOperands, plan: _Plan, *, scale: float, needs_inverse: bool
) -> tuple[_Products, Tensor | None]:
    """What the walks read, and T where it is wanted."""
    q, b, gate, channels = operands.q, operands.b, None, None
    query, eraser = q, b if operands.a is None else operands.a
    if _is_diagonal(operands):
        channels = channel_erasures(operands, plan.cut.chunks, scale=scale, tiles=plan.config.channel_pairs)
        query, eraser, gate = channels.query, channels.eraser, channels.total
    elif operands.log_decay is not None:
        gate = cumulative_gate(operands.log_decay, plan.cut.chunks, num_steps=operands.num_steps)
    made = inverse_products(
        *(operands, channels, None if channels is not None else gate, plan.cut.chunks),
        scale=scale,
        tiles=plan.config.products,
        max_registers=plan.config.product_registers,
        needs_inverse=needs_inverse,
    )
    return _Products(query, eraser, gate, made.pairs, made.key), made.inverse


def _own_tensors(products: _Products, operands: DeltaOperands) -> list[Tensor]:
    """The tensors of ``products`` that are not inputs."""
    own = [products.pairs, products.key]
    if _is_diagonal(operands):
        own += [products.query, products.eraser]
    return own if products.gate is None else [*own, products.gate]


def _saved_products(operands: DeltaOperands, own: list[Tensor]) -> _Products:
    pairs, key, *rest = own
    if _is_diagonal(operands):
        query, eraser, gate = rest
        return _Products(query, eraser, gate, pairs, key)
    eraser = operands.b if operands.a is None else operands.a
    return _Products(operands.q, eraser, rest[0] if rest else None, pairs, key)


def _walk_inputs(operands: DeltaOperands, products: _Products, scale: float) -> DeltaWalkInputs:
    is_diagonal = _is_diagonal(operands)
    return DeltaWalkInputs(
        *(products.query, products.eraser, products.key, operands.v, products.pairs),
        None if is_diagonal else operands.rate,
        *(operands.weight, products.gate, operands.initial_state),
        decay_kind(operands.log_decay),
        operands.reads_before_decay,
        operands.num_steps,
        scale,
    )


def _walk_forward(
    operands: DeltaOperands,
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
    final, spans, end = operands.empty_state(), plan.cut.sequences, None
    if plan.cut.segments is None:
        end = final
    else:
        spans = plan.cut.segments
        updates = final.new_empty(spans.count, *final.shape[1:])
        delta_walk(inputs._replace(initial=None), spans, tiles=plan.config.summary, final=updates, maps=maps)
        join_maps(operands.initial_state, updates, maps, final, spans, reverse=False)
        inputs = inputs._replace(initial=updates)
    if operands.blocks > 1:
        states = _chunk_states(operands, plan) if states is None else states
        delta_walk(inputs, spans, tiles=plan.config.summary, states=states, final=end)
        tiles = plan.config.outputs
        delta_outputs(inputs, states, plan.cut.chunks, tiles=tiles, output=output, corrected=corrected)
    else:
        tiles = plan.config.walk if states is None else plan.config.saving
        delta_walk(inputs, spans, tiles=tiles, output=output, states=states, final=end, corrected=corrected)
    return final


def _walk_reverse(
    operands: DeltaOperands,
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
    d_initial, spans, end = operands.empty_state(), plan.cut.sequences, None
    if plan.cut.segments is None:
        end = d_initial
    else:
        spans = plan.cut.segments
        updates = d_initial.new_empty(spans.count, *d_initial.shape[1:])
        start = inputs._replace(initial=None)
        delta_walk(start, spans, tiles=plan.config.reverse, final=updates, reverse=True)
        join_maps(grad_final, updates, maps, d_initial, spans, reverse=True)
        inputs = inputs._replace(initial=updates)
    delta_walk(inputs, spans, tiles=plan.config.reverse, output=output, states=states, final=end, reverse=True)
    return d_initial


def _gradients(grads: RowGradients, operands: DeltaOperands, d_initial: Tensor) -> DeltaGradients:
    """Sums over the heads that share a key, over the blocks that share a value, and over tiles of K."""
    rate, gate = grads.rate, grads.gate
    if rate is not None and operands.rate is not None:
        rate = rate.sum(0).to(operands.rate.dtype).view(operands.rate.shape)
    if gate is not None and operands.log_decay is not None:
        gate = gate.sum(0).view(operands.log_decay.shape) if gate.ndim == 3 else gate
        gate = gate.to(operands.log_decay.dtype)
    return DeltaGradients(
        sum_groups(grads.q, operands.q.shape),
        None if grads.a is None or operands.a is None else sum_groups(grads.a, operands.a.shape),
        sum_groups(grads.b, operands.b.shape),
        sum_groups(grads.v, operands.v.shape),
        rate,
        grads.weight,
        gate,
        d_initial,
    )
