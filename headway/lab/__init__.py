"""Studies of fleets of disks and of memory that no job and no plan reaches: the verbs of `headway storage` do."""
