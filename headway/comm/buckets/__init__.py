"""DDP's buckets and flags, and the order of FSDP2's collectives."""
