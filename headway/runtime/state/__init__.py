"""State in memory: the generators of a process, copies of tensors, a training state that is put back in place."""
