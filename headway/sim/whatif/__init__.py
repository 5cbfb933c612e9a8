"""Edits of a recorded step, and what a prediction says."""
