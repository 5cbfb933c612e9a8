"""Operation traces that are generated, and played, with a known truth."""
