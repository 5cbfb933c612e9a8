"""Files that appear whole, files of strangers, and what they may cost to read."""
