"""Memory controllers that verify what they read: a simulation."""
