"""Remedies of slow loading: worker processes and threads (DS-Analyzer)."""
