"""Floor 5: input data. What it costs, what would help, and the remedies themselves."""
