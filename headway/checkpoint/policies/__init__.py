"""How often to save, at what rate, and what is kept."""
