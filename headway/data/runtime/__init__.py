"""Remedies for the input side, as they act inside a rank (torch is imported only from here down)."""
