"""The additive family on a GPU: which kernels run, on which tensors, in which order. Equations stand with the kernels.

    forward     [gate] -> [segments: walk from zero, join] -> walk
    backward    [segments: reverse walk from zero, join] -> reverse walk -> gradients

``gate`` is ``cumulative_gate`` for a scalar decay and ``channel_pairs`` for a diagonal one; no decay and a fixed one
need none. A sequence is cut into segments where one walk a (head, block of V) would leave most of the device idle.

With nothing saved, backward makes the gate and walks forward once more. Neither validates nor knows autograd:
``additive_op.py`` does. Shapes: B T HQ HK HV K V, N sequences, C chunk.
"""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from .additive_operands import AdditiveOperands
from .launch_config import AdditiveConfig, Tiles, additive_config, check_same_tiles, device_arch
from .normal_form import sum_groups
from .spans import Partition, Spans, ceil_div, partition
from .triton.backward.additive_gradients import Gradients, gradients
from .triton.backward.channel_gradients import ChannelGradients, channel_gradients
from .triton.inter_chunk.additive_scan import WalkInputs, walk
from .triton.inter_chunk.joins import join_segments
from .triton.intra_chunk.channel_scores import channel_pairs
from .triton.primitives.cumulative_gate import cumulative_gate
from .triton.primitives.gates import DIAGONAL, NO_DECAY, SCALAR, decay_kind


class _Plan(NamedTuple):
    """Tiles, how the tokens are cut, and the kind of decay."""

    config: AdditiveConfig
    partition: Partition
    decay: int


class _Decayed(NamedTuple):
    """q and k with their decay, as the walk takes them: see ``additive_scan``."""

    q: Tensor
    k: Tensor
    gate: Tensor | None
    pairs: Tensor | None

    def forward(self, v: Tensor, initial: Tensor | None, decay: int, scale: float) -> WalkInputs:
        return WalkInputs(self.q, self.k, v, self.gate, self.pairs, initial, decay, scale)

    def reverse(self, grad: Tensor, initial: Tensor | None, decay: int, scale: float) -> WalkInputs:
        return WalkInputs(self.k, self.q, grad, self.gate, self.pairs, initial, decay, scale)


def additive_forward(operands: AdditiveOperands, *, scale: float, save: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Output, final state, and what backward needs besides the inputs.

    Args:
        operands: of any strides; what is not contiguous is copied.
        save: keep the state at every chunk's start; without, backward walks once more.

    Returns:
        output [B, T, HV, V] in the dtype of q, final_state [N, HV, V, K] float32, saved.
    """
    operands = operands.contiguous()
    plan = _plan(operands)
    decayed = _decayed(operands, plan, scale)
    output = plan.partition.chunks.rows_like(operands.v)
    states = _chunk_states(operands, plan) if save else None
    inputs = decayed.forward(operands.v, operands.initial_state, plan.decay, scale)
    final = _walk(inputs, plan, output=output, states=states)
    return output, final, [] if states is None else [states, *_own_tensors(decayed, plan)]


def additive_backward(
    grad_output: Tensor,
    grad_final: Tensor | None,
    operands: AdditiveOperands,
    saved: list[Tensor],
    *,
    scale: float,
    needs_decay_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """Gradients of q, k, v, log_decay (None unless wanted) and the initial state; arguments as ``additive_forward``."""
    operands, grad_output = operands.contiguous(), grad_output.contiguous()
    grad_final = None if grad_final is None else grad_final.contiguous()
    plan = _plan(operands)
    if saved:
        _check_saved(saved, plan)
        states, decayed = saved[0], _saved_decayed(operands, saved[1:], plan)
    else:
        states, decayed = _chunk_states(operands, plan), _decayed(operands, plan, scale)
        inputs = decayed.forward(operands.v, operands.initial_state, plan.decay, scale)
        _walk(inputs, plan, output=None, states=states)
    grad_states, dv = torch.empty_like(states), plan.partition.chunks.rows_like(operands.v)
    reverse = decayed.reverse(grad_output, grad_final, plan.decay, scale)
    d_initial = _walk(reverse, plan, output=dv, states=grad_states, reverse=True)
    grads: ChannelGradients | Gradients
    if operands.log_decay is not None and plan.decay == DIAGONAL.value:
        tiles, given = plan.config.channel_gradients, operands[:3]
        grads = channel_gradients(
            *given,
            operands.log_decay,
            grad_output,
            states,
            grad_states,
            plan.partition.chunks,
            scale=scale,
            tiles=tiles,
        )
    else:
        grads = gradients(
            operands,
            grad_output,
            decayed.gate,
            states,
            grad_states,
            plan.partition.chunks,
            scale=scale,
            tiles=plan.config.gradients,
            needs_gate=needs_decay_grad,
        )
    dq, dk = sum_groups(grads.q, operands.q.shape), sum_groups(grads.k, operands.k.shape)
    gate = grads.gate if needs_decay_grad else None
    return dq, dk, dv, _decay_gradient(gate, operands.log_decay), d_initial


def _plan(operands: AdditiveOperands) -> _Plan:
    q, _, v, log_decay, _, cu_seqlens = operands
    batch, seq_len, heads, value_dim = v.shape
    config = additive_config(device_arch(q.device), q.shape[-1], value_dim, q.dtype)
    parts = partition(
        batch,
        seq_len,
        cu_seqlens,
        heads * ceil_div(value_dim, config.scan.block),
        config.partition_rule,
    )
    return _Plan(config, parts, decay_kind(log_decay))


def _decayed(operands: AdditiveOperands, plan: _Plan, scale: float) -> _Decayed:
    q, k, _, log_decay, *_ = operands
    if log_decay is not None and plan.decay == SCALAR.value:
        return _Decayed(q, k, cumulative_gate(log_decay, plan.partition.chunks), None)
    if log_decay is not None and plan.decay == DIAGONAL.value:
        made = channel_pairs(q, k, log_decay, plan.partition.chunks, scale=scale, tiles=plan.config.channel_scores)
        return _Decayed(made.reach, made.rest, made.total, made.pairs)
    return _Decayed(q, k, log_decay, None)


def _own_tensors(decayed: _Decayed, plan: _Plan) -> list[Tensor]:
    """The tensors of ``decayed`` that are not inputs."""
    own = {SCALAR.value: (decayed.gate,), DIAGONAL.value: (decayed.q, decayed.k, decayed.gate, decayed.pairs)}
    return [x for x in own.get(plan.decay, ()) if x is not None]


def _check_saved(saved: list[Tensor], plan: _Plan) -> None:
    """States are those of these chunks, and so are pairs."""
    chunk_size = plan.config.chunk_size
    saved_size = saved[-1].shape[-1] if plan.decay == DIAGONAL.value else chunk_size
    check_same_tiles((saved[0].shape[0], saved_size), (plan.partition.chunks.count, chunk_size))


def _saved_decayed(operands: AdditiveOperands, own: list[Tensor], plan: _Plan) -> _Decayed:
    if plan.decay == SCALAR.value:
        return _Decayed(operands.q, operands.k, own[0], None)
    if plan.decay == DIAGONAL.value:
        return _Decayed(*own)
    return _Decayed(operands.q, operands.k, operands.log_decay, None)


def _chunk_states(operands: AdditiveOperands, plan: _Plan) -> Tensor:
    heads, value_dim = operands.v.shape[2:]
    return operands.v.new_empty(plan.partition.chunks.count, heads, operands.q.shape[-1], value_dim)


def _walk(
    inputs: WalkInputs, plan: _Plan, *, output: Tensor | None, states: Tensor | None, reverse: bool = False
) -> Tensor:
    """Walk every sequence, in segments where the plan says so; returns the state at the other end."""
    final = _empty_states(inputs, plan.partition.sequences)
    step = partial(walk, chunk_size=plan.config.chunk_size, reverse=reverse)
    tiles = _walk_tiles(plan, states, reverse=reverse)
    if plan.partition.segments is None:
        step(inputs, plan.partition.sequences, tiles=tiles, output=output, states=states, final=final)
        return final
    updates, decay = _empty_states(inputs, plan.partition.segments), _span_decay(inputs, plan.partition.segments)
    step(
        replace(inputs, initial=None),
        plan.partition.segments,
        tiles=plan.config.summary,
        output=None,
        states=None,
        final=updates,
        span_decay=decay,
    )
    join_segments(inputs.initial, updates, decay, final, plan.partition.segments, kind=plan.decay, reverse=reverse)
    step(
        replace(inputs, initial=updates), plan.partition.segments, tiles=tiles, output=output, states=states, final=None
    )
    return final


def _empty_states(inputs: WalkInputs, spans: Spans) -> Tensor:
    heads, value_dim = inputs.value.shape[2:]
    return inputs.value.new_empty(spans.count, heads, value_dim, inputs.writer.shape[-1], dtype=torch.float32)


def _walk_tiles(plan: _Plan, states: Tensor | None, *, reverse: bool) -> Tiles:
    config = plan.config
    if plan.decay == DIAGONAL.value:
        return config.channel_scan
    if reverse:
        return config.reverse
    return config.scan if states is None or plan.decay != SCALAR.value else config.saving


def _span_decay(inputs: WalkInputs, segments: Spans) -> Tensor | None:
    if inputs.decay == NO_DECAY.value:
        return None
    shape = [segments.count, inputs.value.shape[2]]
    if inputs.decay == DIAGONAL.value:
        shape.append(inputs.writer.shape[-1])
    return inputs.value.new_empty(shape, dtype=torch.float32)


def _decay_gradient(gate: Tensor | None, log_decay: Tensor | None) -> Tensor | None:
    """The gradient in the shape of log_decay; parts of a scalar gate's are summed over blocks of K."""
    if gate is None or log_decay is None or log_decay.ndim == 4:
        return gate
    by_token = gate.squeeze(0) if gate.shape[0] == 1 else gate.sum(0)  # [HV, tokens]
    if log_decay.ndim == 1:
        return by_token.sum(1)
    return by_token.T.reshape(log_decay.shape)
