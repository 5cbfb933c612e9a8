"""Which ranks compute what: partitions of a model over devices and their links."""
