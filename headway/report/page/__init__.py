"""The HTML page and its parts."""
