"""What a checkpoint holds, whether it is what was written, how two differ, and the repair of damage."""
