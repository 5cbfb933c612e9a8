"""The page of a run while it goes on."""
