"""Inside ranks: remedies for pipelines. The only part of the room that imports torch."""
