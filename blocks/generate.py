"""Sampling from a language model, one token at a time from its state."""

import math

import torch
from torch import Tensor

from .causal_lm import CausalLM


@torch.no_grad()
def generate(
    model: CausalLM,
    tokens: Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Continue prompts.

    Args:
        model: the language model.
        tokens: prompts, [B, T] int64.
        max_new_tokens: how many to add to each.
        temperature: logits are divided by it; 0 takes the likeliest token each time.
        top_k: sample among the k likeliest only.
        generator: source of randomness, on the device of the model.
        mask: [B, T] bool, True = real, for padded prompts.

    Returns:
        The prompts as given, then the new tokens, [B, T + max_new_tokens].

    Raises:
        ValueError: a negative temperature or count, top_k < 1, or a prompt without a real token.
    """
    _check(max_new_tokens, temperature, top_k, mask)
    if max_new_tokens == 0:
        return tokens
    logits, state = model(tokens, mask=mask)
    new = [_sample(_last(logits, mask), temperature, top_k, generator)]
    while len(new) < max_new_tokens:
        logits, state = model(new[-1], state)
        new.append(_sample(logits[:, -1], temperature, top_k, generator))
    return torch.cat([tokens, *new], dim=1)


def _last(logits: Tensor, mask: Tensor | None) -> Tensor:
    """Logits at the last real token of each row, [B, vocab_size]."""
    if mask is None:
        return logits[:, -1]
    place = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, place, -1).amax(dim=1)
    return logits[torch.arange(len(last), device=mask.device), last]


def _sample(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """One token a row, [B, 1]."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    vocab_size = logits.shape[-1]
    top, tokens = logits.float().topk(vocab_size if top_k is None else min(top_k, vocab_size), dim=-1)
    choice = torch.multinomial(torch.softmax((top - top[..., :1]) / temperature, dim=-1), 1, generator=generator)
    return tokens.gather(-1, choice)


def _check(max_new_tokens: int, temperature: float, top_k: int | None, mask: Tensor | None) -> None:
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens: expected 0 or more, got {max_new_tokens}")
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature: expected a number from 0 up, got {temperature}; 0 takes the likeliest token")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k: expected 1 or more, got {top_k}; leave it out to sample among all tokens")
    if mask is not None and not bool(mask.any(dim=1).all()):
        rows = (~mask.any(dim=1)).nonzero().flatten().tolist()
        raise ValueError(f"mask: expected a real token in every prompt, got none in rows {rows}; drop these rows")
