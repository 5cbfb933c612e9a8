"""A training step from a model's layers: its Dag, moves, recorded steps."""
