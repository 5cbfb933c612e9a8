"""Input pipelines of operators: measured, planned and run (cedar)."""
