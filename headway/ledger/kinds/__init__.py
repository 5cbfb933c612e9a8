"""Buckets, sub-lines, causes: what time is called."""
