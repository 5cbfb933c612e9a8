"""Compressed gradients: BytePS-Compress and Espresso."""
