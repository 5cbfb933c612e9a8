"""Floor 4, choice: what the job is, what could be changed, which set of changes wins most."""
