"""The profiler's JSON: Kineto's rows, messages, arrows, names."""
