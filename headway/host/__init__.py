"""Floor 5, the host: garbage collection, logging, checkpoints that stall, ranks that lag."""
