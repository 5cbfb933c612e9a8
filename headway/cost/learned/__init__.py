"""Costs that are learned from measurements: a new device from a few samples of it and the measurements of others."""
