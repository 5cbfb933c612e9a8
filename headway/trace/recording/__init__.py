"""Rings become a run: rows, segments, loads, deliveries, evaluation, pauses."""
