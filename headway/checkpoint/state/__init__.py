"""A training job's state as named tensors in boxes of local memory. With torch."""
