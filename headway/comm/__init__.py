"""Floor 5, communication: the size of DDP buckets, faster links."""
