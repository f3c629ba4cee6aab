"""What makes a transition from hidden states inside a mixer, and the names that recipes have for it."""
