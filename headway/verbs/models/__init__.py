"""Verbs of a model and how its training is laid out: growth, tuning, costs, communication, pipelines."""
