"""Examples as bytes: where they come from, how they are packed, in which order they are read."""
