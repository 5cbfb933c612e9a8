"""Floor 3: accounts. Every device-nanosecond in one bucket, and what caused each loss."""
