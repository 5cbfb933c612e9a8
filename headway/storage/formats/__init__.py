"""Checkpoint formats read and written without torch."""
