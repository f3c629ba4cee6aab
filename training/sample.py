"""A sample of text from a trained byte model: the start of the held-out text, continued."""

import torch

from statemix.blocks import CausalLM, generate
from statemix.recipes.task import BYTE_VALUES

from .byte_text import ByteText

PROMPT_BYTES = 64
NEW_BYTES = 240


def sample_text(model: CausalLM, task: ByteText, *, device: torch.device, temperature: float = 0.7) -> str:
    """Continue the first held-out bytes, always in the same way. Bytes that are not UTF-8 show as U+FFFD."""
    prompt = task.text.heldout[None, :PROMPT_BYTES].long().to(device)
    generator = torch.Generator(device).manual_seed(task.seed)
    tokens = generate(model, prompt, max_new_tokens=NEW_BYTES, temperature=temperature, generator=generator)
    # A vocabulary may be larger; such tokens stand for no byte.
    return bytes(token for token in tokens[0].tolist() if token < BYTE_VALUES).decode("utf-8", errors="replace")
