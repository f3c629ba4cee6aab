"""The definition every form is held against: dense M_t, one micro-step after another, document after document.

    S <- S M_tj + w_tj v_tj k_tj^T   for j = 1..n;      o_t = scale * S q_t

It shares nothing with ``scan`` but ``materialize``, which a check of its own holds against ``apply``.
"""

import torch
from torch import Tensor

from statemix.harness.problem import Problem
from statemix.kernels import expand_heads
from statemix.transitions import ScanResult


def definition(problem: Problem, scale: float | None = None) -> ScanResult:
    """Output and final state of a problem in the dtype of its tensors."""
    batch, seq_len = problem.q.shape[:2]
    num_heads, key_dim = problem.v.shape[-2], problem.q.shape[-1]
    scale = key_dim**-0.5 if scale is None else scale
    matrices = [
        step.materialize(key_dim).to(problem.q).expand(batch, seq_len, num_heads, key_dim, key_dim).unbind(1)
        for step in problem.transition.steps()
    ]
    q = expand_heads(problem.q, num_heads, dim=2).unbind(1)
    writes = _writes(problem).unbind(1)  # w v k^T, [B, n, HV, V, K]
    outputs, finals = [], []
    for document, start, end in _documents(problem):
        state = _initial_state(problem, document)
        for t in range(start, end):
            num_writes = writes[t].shape[1]
            for j in range(max(num_writes, len(matrices))):
                if j < len(matrices):
                    state = state @ matrices[j][t]
                if num_writes > 1 or j == len(matrices) - 1:
                    state = state + writes[t][:, j if num_writes > 1 else 0]
            outputs.append(scale * (state @ q[t].unsqueeze(-1)).squeeze(-1))
        finals.append(state)
    outputs += [writes[0].new_zeros(batch, *problem.v.shape[-2:])] * (seq_len - len(outputs))
    return ScanResult(torch.stack(outputs, dim=1), torch.cat(finals))


def _writes(problem: Problem) -> Tensor:
    k, v, write = problem.k, problem.v, problem.write
    if k.ndim == 4:
        k, v, write = k.unsqueeze(2), v.unsqueeze(2), None if write is None else write.unsqueeze(2)
    k = expand_heads(k, v.shape[3], dim=3)
    if write is not None:
        per_block = write.ndim == k.ndim
        scale = write.repeat_interleave(k.shape[-1] // write.shape[-1], -1) if per_block else write.unsqueeze(-1)
        k = scale * k
    return v.unsqueeze(-1) * k.unsqueeze(-2)


def _documents(problem: Problem) -> list[tuple[slice, int, int]]:
    """Sequences of the state with the tokens that act on them: the batch as a whole, or each packed document."""
    if problem.cu_seqlens is None:
        return [(slice(None), 0, problem.q.shape[1])]
    offsets = problem.cu_seqlens.tolist()
    return [(slice(n, n + 1), *bounds) for n, bounds in enumerate(zip(offsets, offsets[1:], strict=False))]


def _initial_state(problem: Problem, document: slice) -> Tensor:
    if problem.initial_state is not None:
        return problem.initial_state[document]
    v = problem.v
    return v.new_zeros(v.shape[0], *v.shape[-2:], problem.q.shape[-1])
