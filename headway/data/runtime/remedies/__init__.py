"""Remedies under an unmodified script's loader."""
