"""May another process read this dataset? Looks, readings in forked children, and what all code goes by."""
