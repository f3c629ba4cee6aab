"""Kernels for GPUs, in Triton, by stage of the chunk form; nothing above imports this before a kernel is to run."""
