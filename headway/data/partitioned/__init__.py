"""A cache that several hosts hold together (CoorDL)."""
