"""Codes, and the parity of checkpoints over the files of their ranks: encode, find losses, repair, restripe."""
