"""The ledger as it is asked: causes, hints, comparisons, metrics."""
