"""Which bytes of which files hold which part of a tensor, without torch."""
