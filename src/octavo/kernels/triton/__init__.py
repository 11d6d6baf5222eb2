"""Triton kernels for GPUs: one file for each operation."""
