"""Floor 1: facts. Columnar events: their schema, the recorder, readers, writers."""
