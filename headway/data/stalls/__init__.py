"""Where an input pipeline loses accelerator time: the model and its measurements (DS-Analyzer)."""
