"""Floor 1: facts. What hardware can do, and what models ask of it: specs, collectives, FLOPs, memory."""
