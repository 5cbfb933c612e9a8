"""What each parameter of a transformer is, and how it grows without changing the model's outputs; no torch here."""
