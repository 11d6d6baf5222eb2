"""Triton kernels for GPUs: one file for each operation; `backend` implements the interface with them."""
