"""Batches of a script's own loader, made ahead of it, compared with its own, and handed back."""
