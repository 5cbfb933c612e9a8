"""Verbs of stored bytes: `headway storage ...`."""
