"""The parts of checkpointing that need torch."""
