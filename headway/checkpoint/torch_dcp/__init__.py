"""Under and beside torch's own distributed checkpoint (DCP). With torch."""
