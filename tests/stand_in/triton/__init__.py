"""Stands in for Triton, as far as a program launches kernels: they are functions of Python's, given addresses."""

from .runtime.jit import jit  # noqa: F401
