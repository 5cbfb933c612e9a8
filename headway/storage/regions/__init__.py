"""Protected regions: a mapped file whose checksums and parity follow behind the writer's back."""
