"""What the launcher keeps of a run: output, rings that are drained, run.json, exit classes, metrics for others."""
