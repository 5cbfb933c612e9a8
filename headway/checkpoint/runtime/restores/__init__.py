"""Restores: what is wanted, where it is, how ranks share it."""
