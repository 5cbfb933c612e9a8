"""The drop-in DataLoader: where it stands, its threads, the state of its samplers (CheckFreq)."""
