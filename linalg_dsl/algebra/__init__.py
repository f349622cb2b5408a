"""Matrices, vectors and scalars as symbolic expressions: no kernels, no torch."""
