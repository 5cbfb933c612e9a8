"""Integrity of non-volatile memory, simulated (Vilamb, TVARAK)."""
