"""What kernels of every stage share: loads of micro-steps, cumulative gates, factors of decay."""
