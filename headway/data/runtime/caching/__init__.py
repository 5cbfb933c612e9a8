"""Examples kept in memory: the remedy, and the cache inside a loader."""
