"""What runs beside the ranks: a filler that keeps their cores busy in the gaps."""
