"""What needs torch: the operators of a step, and how long operators take on this host."""
