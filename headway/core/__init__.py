"""Floor 0: what every room stands on. Units, errors, tables, mesh, search, workers, shared memory."""
