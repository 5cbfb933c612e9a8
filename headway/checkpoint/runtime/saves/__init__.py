"""Saves: when, by whom, what is under way."""
