"""Verbs of data: `headway data ...`."""
