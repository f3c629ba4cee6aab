"""Gradients of all chunks at once, from the states and their gradients at the borders of chunks."""
