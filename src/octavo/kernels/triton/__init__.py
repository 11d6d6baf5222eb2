"""Triton kernels for GPUs."""

from octavo.kernels.triton.proxy_fences import install

install()
