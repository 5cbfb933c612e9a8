"""Forked children, threads and words beside a script."""
