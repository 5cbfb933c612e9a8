"""Starting ranks, watching over them, starting them again."""
