"""Examples and batches as plain memory, and what torch's collate function makes of them, without torch."""
