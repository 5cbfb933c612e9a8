"""Verbs of jobs and clusters: queues, prices, power, failures, hangs."""
