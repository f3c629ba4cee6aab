"""The normal form: what the kernels need to know of a transition.

Every transition that has a chunk form lowers to n micro-steps a token, decay first, then read-erase-write:

    S <- S Diag(d_t);   for j = 1..n:   u = w_tj v_tj - S a_tj,   S <- S + u b_tj^T;      o_t = scale * S q_t

a = 0 gives linear attention and gates; a = beta k, b = k gives the delta rule. Either way
S_t = S_{t-1} Diag(d_t) + U_t^T B_t: the delta family is the additive family run on corrected values u.

Shapes: B batch, T time, H key heads, HV value heads, K key_dim, V value_dim, m erase pairs a token.
Source: arXiv:2406.06484 section 3 (delta rule), arXiv:2502.10297 section 3 (n micro-steps).
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class NormalForm:
    """M_t as a decay followed by delta updates S <- S (I - a b^T); ``scan`` adds the writes.

    Attributes:
        log_decay: log d_t: None, [HV], [HV, blocks], [B, T, HV], [B, T, HV, blocks] or [B, T, HV, K].
        erase: (a, b), a [B, T, HV, K] and b [B, T, H or HV, K], each with an axis m after T for m pairs a token.
        reads_before_decay: the first delta update of a token reads the state before its decay.
        blocks: M_t is block-diagonal with this many blocks of K / blocks.
        erase_beta: None, or beta where ``erase`` is (c, b) with a = beta c and c of H or HV heads. [B, T, HV], with the
            axis m if c has it, and with a last axis of size 1 or blocks if it then has as many axes as c. One tensor in
            both places of ``erase`` says that c is b: kernels then store neither beta c nor b a second time.
    """

    log_decay: Tensor | None = None
    erase: tuple[Tensor, Tensor] | None = None
    reads_before_decay: bool = False
    blocks: int = 1
    erase_beta: Tensor | None = None

    def multiplied(self) -> "NormalForm":
        """The same with ``erase_beta`` multiplied into a."""
        if self.erase is None or self.erase_beta is None:
            return self
        read, beta = self.erase[0], self.erase_beta
        beta = repeat_to(beta if beta.ndim == read.ndim else beta.unsqueeze(-1), read.shape[-1])
        read = beta * expand_heads(read, beta.shape[-2], dim=read.ndim - 2)
        return replace(self, erase=(read, self.erase[1]), erase_beta=None)

    def along(self, key: Tensor) -> "NormalForm":
        """The same with the write key itself wherever ``erase`` holds another tensor that ``is_same`` as it."""
        if self.erase is None:
            return self
        read, direction = self.erase
        if direction is key or not is_same(direction, key):
            return self
        return replace(self, erase=(key if read is direction or is_same(read, key) else read, key))


def num_micro_steps(form: NormalForm, k: Tensor) -> int:
    """n, how many micro-steps a token of ``form`` with the writes along k takes.

    A delta update along the write key shares its micro-step with the write. Any other direction takes two, first
    S <- S (I - a b^T), then the write.

    Raises:
        NotImplementedError: the erase pairs of a token are neither as many as its writes nor met by a single write.
    """
    num_writes = 1 if k.ndim == 4 else k.shape[2]
    if form.erase is None or form.erase[1] is k:
        return num_writes
    num_pairs = with_steps(form.erase[1]).shape[2]
    if num_writes not in (1, num_pairs):
        raise NotImplementedError(f"erase: {num_pairs} erase pairs and {num_writes} writes a token have no normal form")
    return num_pairs + num_writes


def is_same(x: Tensor, y: Tensor) -> bool:
    """x may stand for y, with the gradients of both: one tensor, views of it, or copies where no gradient is asked for.

    Nothing waits for a GPU: only on the CPU are the values of a copy compared, and nowhere while a compiler traces or
    inside a transform.
    """
    if x is y:
        return True
    if _is_abstract() or x.shape != y.shape or x.dtype != y.dtype or x.device != y.device:
        return False
    needs_gradient = torch.is_grad_enabled() and (x.requires_grad or y.requires_grad)
    if needs_gradient and not _are_views_of_one(x, y):
        return False
    return _is_one_memory(x, y) or (not needs_gradient and has_equal_values(x, y))


def has_equal_values(x: Tensor, y: Tensor, *, may_wait: bool = False) -> bool:
    """What two tensors hold is the same, as far as it can be read: on a GPU only where the host may wait for it.

    Nothing can be while a compiler traces or inside a transform.
    """
    if _is_abstract():
        return False
    is_plain = type(x) in _PLAIN and type(y) in _PLAIN and torch._C._len_torch_dispatch_stack() == 0
    can_read = is_plain and (x.device.type == "cpu" or (may_wait and x.device.type == "cuda"))
    return can_read and (x.shape, x.dtype, x.device) == (y.shape, y.dtype, y.device) and torch.equal(x, y)


def is_transformed() -> bool:
    """Inside ``torch.func`` or a forward-mode level, of which the operators know nothing."""
    return torch.autograd.forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None


def _is_abstract() -> bool:
    """Tensors have neither values nor memory that say which of them are one."""
    return torch.compiler.is_compiling() or is_transformed()


_PLAIN = (Tensor, torch.nn.Parameter)


def _are_views_of_one(x: Tensor, y: Tensor) -> bool:
    """Autograd knows both as views of one tensor: the gradient of either reaches it."""
    base = y if y._base is None else y._base
    return x.requires_grad and y.requires_grad and (x if x._base is None else x._base) is base


def _is_one_memory(x: Tensor, y: Tensor) -> bool:
    is_plain = type(x) in _PLAIN and type(y) in _PLAIN and x.device.type != "meta"
    return is_plain and x.data_ptr() == y.data_ptr() and x.stride() == y.stride()


def with_steps(x: Tensor) -> Tensor:
    """x [B, T, HV, K] or [B, T, m, HV, K] with its axis m."""
    return x if x.ndim == 5 else x.unsqueeze(2)


def with_last_axis(log_decay: Tensor) -> Tensor:
    """[HV] or [B, T, HV] with a last axis of size 1; one of blocks or channels stays."""
    return log_decay.unsqueeze(-1) if log_decay.ndim in (1, 3) else log_decay


def repeat_to(x: Tensor, size: int) -> Tensor:
    """x [..., 1] as it is, x [..., blocks] with a last axis of ``size``."""
    return x if x.shape[-1] in (1, size) else x.repeat_interleave(size // x.shape[-1], dim=-1)


def sum_groups(x: Tensor, shape: torch.Size) -> Tensor:
    """[B, T, HV, K] -> [B, T, H, K]: the gradient of what heads share, a key or a value, is the sum over them."""
    if x.shape == shape:
        return x
    return x.unflatten(2, (shape[2], -1)).sum(3, dtype=torch.float32).to(x.dtype)


def expand_heads(x: Tensor, num_heads: int, dim: int) -> Tensor:
    """Repeat each head so that value head h reads key head h // (HV / H)."""
    return x if x.shape[dim] == num_heads else x.repeat_interleave(num_heads // x.shape[dim], dim)
