"""The additive family on a GPU: which kernels run, on which tensors, in which order. Equations stand with the kernels.

    forward     [gate] -> [segments: scan from zero, join] -> inter-chunk scan
    backward    [segments: reverse scan from zero, join] -> reverse scan -> gradients

``gate`` is ``cumulative_gate`` for a scalar decay and ``channel_scores`` for a diagonal one; no decay and a fixed one
need none. A sequence is partitioned into segments where one scan a (head, block of V) would leave most of the device
idle.

With nothing saved, backward makes the gate and scans forward once more. Neither validates nor knows autograd:
``operators.py`` does. n writes a token are n tokens, of which the first alone decays and the last alone is read out.
Shapes: B T HQ HK HV K V, N sequences, C chunk, n micro-steps a token.
"""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from statemix.kernels.launch_config import AdditiveConfig, Tiles, additive_config, check_same_tiles, device_arch
from statemix.kernels.normal_form import sum_groups
from statemix.kernels.operands import Decay, Gradients, Saved, ScanOperands
from statemix.kernels.spans import Partition, Spans, ceil_div, partition

from .backward.additive_gradients import additive_gradients
from .backward.channel_gradients import channel_gradients
from .inter_chunk.additive_scan import AdditiveScanInputs, inter_chunk_scan
from .inter_chunk.joins import join_segments
from .intra_chunk.channel_scores import channel_scores
from .primitives.cumulative_gate import cumulative_gate


class _Plan(NamedTuple):
    """Tiles, how the tokens are partitioned, and the kind of decay."""

    config: AdditiveConfig
    partition: Partition
    decay: Decay


class _Decayed(NamedTuple):
    """q and k with their decay, as the scan takes them: see ``additive_scan``."""

    q: Tensor
    k: Tensor
    gate: Tensor | None
    scores: Tensor | None

    def forward(self, operands: ScanOperands, scale: float) -> AdditiveScanInputs:
        shared = (operands.v, self.gate, self.scores, operands.initial_state, operands.decay.value, scale)
        return AdditiveScanInputs(self.q, self.k, *shared)

    def reverse(self, grad: Tensor, initial: Tensor | None, decay: Decay, scale: float) -> AdditiveScanInputs:
        return AdditiveScanInputs(self.k, self.q, grad, self.gate, self.scores, initial, decay.value, scale)


def forward(operands: ScanOperands, *, scale: float, save: bool) -> tuple[Tensor, Tensor, Saved | None]:
    """Output, final state, and what backward needs besides the operands.

    Args:
        operands: without erase pairs, of any strides; what is not contiguous is copied.
        save: keep the state at every chunk's start; without, backward scans once more.

    Returns:
        output [B, T, HV, V] in the dtype of q, final_state [N, HV, V, K] float32, saved.
    """
    num_steps = operands.num_steps
    operands = _one_step_a_token(operands, num_steps).contiguous()
    plan = _plan(operands)
    decayed = _decayed(operands, plan, scale)
    output = plan.partition.chunks.array_like(operands.v)
    states = _chunk_states(operands, plan) if save else None
    final = _scan(decayed.forward(operands, scale), plan, output=output, states=states)
    if num_steps > 1:
        output = output[:, num_steps - 1 :: num_steps].contiguous()
    return output, final, None if states is None else _saved(states, decayed, plan)


def backward(
    grad_output: Tensor,
    grad_final: Tensor | None,
    operands: ScanOperands,
    saved: Saved | None,
    *,
    scale: float,
    needs_decay_grad: bool,
) -> Gradients:
    """Gradients of every operand, that of log_decay where it is asked for; arguments as ``forward``."""
    by_token, num_steps = operands, operands.num_steps
    operands = _one_step_a_token(by_token, num_steps).contiguous()
    grad_output = _at_step(grad_output, -1, num_steps).contiguous()
    grad_final = None if grad_final is None else grad_final.contiguous()
    plan = _plan(operands)
    if saved is not None:
        _check_saved(saved, plan)
        states, decayed = saved.states, _saved_decayed(operands, saved, plan)
    else:
        states, decayed = _chunk_states(operands, plan), _decayed(operands, plan, scale)
        _scan(decayed.forward(operands, scale), plan, output=None, states=states)
    grad_states, dv = torch.empty_like(states), plan.partition.chunks.array_like(operands.v)
    reverse = decayed.reverse(grad_output, grad_final, plan.decay, scale)
    d_initial = _scan(reverse, plan, output=dv, states=grad_states, reverse=True)
    dq, dk, gate = _key_gradients(
        operands, grad_output, decayed.gate, states, grad_states, plan, scale=scale, needs_gate=needs_decay_grad
    )
    d_decay = _decay_gradient(gate if needs_decay_grad else None, operands.log_decay)
    if num_steps > 1:
        dq = dq[:, num_steps - 1 :: num_steps]
        d_decay = None if d_decay is None else d_decay[:, ::num_steps]
    if by_token.log_decay is not None and d_decay is not None:
        d_decay = d_decay.to(by_token.log_decay.dtype).contiguous()
    dq, dk = sum_groups(dq, by_token.q.shape), sum_groups(dk, by_token.b.shape)
    return Gradients(dq, None, dk, dv, None, None, d_decay, d_initial)


def _key_gradients(
    operands: ScanOperands,
    grad_output: Tensor,
    gate: Tensor | None,
    states: Tensor,
    grad_states: Tensor,
    plan: _Plan,
    *,
    scale: float,
    needs_gate: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of every query and key, one a value head, and of the gate."""
    chunks, config = plan.partition.chunks, plan.config
    tensors = (states, grad_states, chunks)
    if plan.decay is Decay.DIAGONAL:
        tiles = config.channel_gradients
        grads = channel_gradients(
            *(operands, grad_output, operands.v, None, *tensors), scale=scale, tiles=tiles, score_tiles=tiles
        )
        return grads.q, grads.b, grads.gate
    tiles = config.gradients
    return additive_gradients(operands, grad_output, gate, *tensors, scale=scale, tiles=tiles, needs_gate=needs_gate)


def _one_step_a_token(operands: ScanOperands, num_steps: int) -> ScanOperands:
    """n writes a token as n tokens."""
    if num_steps == 1:
        return operands
    log_decay = operands.log_decay
    q = operands.q.unsqueeze(2).expand(-1, -1, num_steps, -1, -1).flatten(1, 2)
    log_decay = None if log_decay is None else _at_step(log_decay, 0, num_steps)
    cu_seqlens = None if operands.cu_seqlens is None else operands.cu_seqlens * num_steps
    return operands._replace(q=q, log_decay=log_decay, cu_seqlens=cu_seqlens)


def _at_step(x: Tensor, step: int, num_steps: int) -> Tensor:
    """x [B, T, ...] as one step of every token, [B, T n, ...], zero at the others."""
    if num_steps == 1:
        return x
    spread = x.new_zeros(*x.shape[:2], num_steps, *x.shape[2:])
    spread[:, :, step] = x
    return spread.flatten(1, 2)


def _plan(operands: ScanOperands) -> _Plan:
    (batch, seq_len, heads, value_dim), q = operands.v.shape, operands.q
    config = additive_config(device_arch(q.device), q.shape[-1], value_dim, q.dtype)
    programs = heads * ceil_div(value_dim, config.scan.block)
    parts = partition(batch, seq_len, operands.cu_seqlens, programs, config.partition_rule)
    return _Plan(config, parts, operands.decay)


def _decayed(operands: ScanOperands, plan: _Plan, scale: float) -> _Decayed:
    q, k, log_decay = operands.q, operands.b, operands.log_decay
    if log_decay is not None and plan.decay is Decay.SCALAR:
        return _Decayed(q, k, cumulative_gate(log_decay, plan.partition.chunks), None)
    if log_decay is not None and plan.decay is Decay.DIAGONAL:
        scores = channel_scores(operands, plan.partition.chunks, scale=scale, tiles=plan.config.channel_scores)
        return _Decayed(scores.q_from_start, scores.b_to_end, scores.total, scores.A_qk)
    return _Decayed(q, k, log_decay, None)


def _saved(states: Tensor, decayed: _Decayed, plan: _Plan) -> Saved:
    """The states, and of ``decayed`` what is not an operand."""
    if plan.decay is Decay.DIAGONAL:
        return Saved(states, scores=decayed.scores, query=decayed.q, key=decayed.k, gate=decayed.gate)
    return Saved(states, gate=decayed.gate if plan.decay is Decay.SCALAR else None)


def _check_saved(saved: Saved, plan: _Plan) -> None:
    """States are those of these chunks, and so are scores."""
    chunk_size = plan.config.chunk_size
    saved_size = chunk_size if saved.scores is None else saved.scores.shape[-1]
    check_same_tiles((saved.states.shape[0], saved_size), (plan.partition.chunks.count, chunk_size))


def _saved_decayed(operands: ScanOperands, saved: Saved, plan: _Plan) -> _Decayed:
    q, k = operands.q if saved.query is None else saved.query, operands.b if saved.key is None else saved.key
    return _Decayed(q, k, operands.log_decay if plan.decay is Decay.FIXED else saved.gate, saved.scores)


def _chunk_states(operands: ScanOperands, plan: _Plan) -> Tensor:
    heads, value_dim = operands.v.shape[2:]
    return operands.v.new_empty(plan.partition.chunks.count, heads, operands.q.shape[-1], value_dim)


def _scan(
    inputs: AdditiveScanInputs, plan: _Plan, *, output: Tensor | None, states: Tensor | None, reverse: bool = False
) -> Tensor:
    """Scan every sequence, in segments where the plan says so; returns the state at the other end."""
    final, segments = _empty_states(inputs, plan.partition.sequences), plan.partition.segments
    scan = partial(inter_chunk_scan, chunk_size=plan.config.chunk_size, reverse=reverse)
    tiles = _scan_tiles(plan, states, reverse=reverse)
    if segments is None:
        scan(inputs, plan.partition.sequences, tiles=tiles, output=output, states=states, final=final)
        return final
    updates, decay = _empty_states(inputs, segments), _span_decay(inputs, segments)
    from_zero = replace(inputs, initial=None)
    scan(from_zero, segments, tiles=plan.config.summary, final=updates, span_decay=decay)
    join_segments(inputs.initial, updates, decay, final, segments, kind=plan.decay.value, reverse=reverse)
    scan(replace(inputs, initial=updates), segments, tiles=tiles, output=output, states=states)
    return final


def _empty_states(inputs: AdditiveScanInputs, spans: Spans) -> Tensor:
    heads, value_dim = inputs.value.shape[2:]
    return inputs.value.new_empty(spans.count, heads, value_dim, inputs.writer.shape[-1], dtype=torch.float32)


def _scan_tiles(plan: _Plan, states: Tensor | None, *, reverse: bool) -> Tiles:
    config = plan.config
    if plan.decay is Decay.DIAGONAL:
        return config.channel_scan
    if reverse:
        return config.reverse
    return config.scan if states is None or plan.decay is not Decay.SCALAR else config.saving


def _span_decay(inputs: AdditiveScanInputs, segments: Spans) -> Tensor | None:
    if inputs.decay == Decay.NONE:
        return None
    shape = [segments.count, inputs.value.shape[2]]
    if inputs.decay == Decay.DIAGONAL:
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
