"""What a rank writes while it runs: records in rings, and the page of its progress."""
