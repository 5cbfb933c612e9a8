"""A Dag of a step and its replay: kernels, greedy list scheduling, attribution, critical path."""
