"""The scan over chunks that carries the state, forward and in reverse, and what is made from its states."""
