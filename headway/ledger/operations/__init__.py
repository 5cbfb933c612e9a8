"""The ledger of an operation trace: dependencies, what-if groups, stragglers."""
