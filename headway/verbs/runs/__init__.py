"""Verbs of a run: record it, explain it, plan, compare, report, watch."""
