"""Verbs of checkpoints: `headway ckpt ...`."""
