"""Traces in memory and in files: columns, names, steps, nesting, sweeps."""
