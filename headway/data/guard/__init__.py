"""Which loader of a script may be touched: trials, proofs and comparisons before and while a remedy acts."""
