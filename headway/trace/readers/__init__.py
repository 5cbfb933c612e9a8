"""Every format that can be read or written, told apart by content."""
