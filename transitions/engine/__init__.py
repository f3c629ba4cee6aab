"""What runs a transition: the scan, its inputs, and the choice of form and backend."""
