"""Gradient buckets of DDP replayed: windows, threads, links, edits, compression."""
