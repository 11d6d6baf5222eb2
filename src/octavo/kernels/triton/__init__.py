"""Kernels in Triton, for GPUs: one file an operation, bound to the interface in `backend`."""
