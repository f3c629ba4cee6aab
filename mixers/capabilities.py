"""What a mixer says it can do, as data on its class: the harness runs the checks of what is declared."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Capabilities:
    """Declared where a mixer differs from the defaults: ``capabilities = Capabilities(packs=False)``.

    Attributes:
        is_causal: no output depends on later tokens, so that a state can be handed on; False leaves out what is about
            the future and about states.
        packs: takes packed documents as ``cu_seqlens``; False says that it refuses them.
        has_constant_state: its state has the same shapes after any number of tokens.
    """

    is_causal: bool = True
    packs: bool = True
    has_constant_state: bool = False
