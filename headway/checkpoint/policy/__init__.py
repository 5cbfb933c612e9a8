"""How often a job saves, what that costs, and which checkpoints stay."""
