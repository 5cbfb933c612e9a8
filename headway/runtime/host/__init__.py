"""The host and its devices, and which rank of which world a process is."""
