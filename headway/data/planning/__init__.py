"""Input pipelines as their author declares them: measured, planned, reordered."""
