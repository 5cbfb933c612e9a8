"""The data server: one preparation of an example for all jobs of a machine."""
