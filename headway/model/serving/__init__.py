"""LLM-PQ: one language model served on unlike devices, with the bits of each layer chosen."""
