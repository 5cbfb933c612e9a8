"""Pipelines: a schedule is data, lowered once, replayed for time and memory."""
