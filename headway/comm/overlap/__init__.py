"""Matmuls that hide their collective: Flux, with MegaScale's overlaps."""
