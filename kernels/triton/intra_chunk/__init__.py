"""What the micro-steps of one chunk make of each other, for all chunks at once: scores and the UT transform."""
