"""Remedies for communication, as they act inside a rank (torch is imported only from here down)."""
