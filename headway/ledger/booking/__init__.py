"""Who owns each nanosecond of a rank: rows, waits, arrivals, phases."""
