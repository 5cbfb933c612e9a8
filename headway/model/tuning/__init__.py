"""MLtuner: settings searched inside a run, by branches of its training state."""
