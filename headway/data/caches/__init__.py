"""Caches of examples: in tiers, over hosts, and how to divide them."""
