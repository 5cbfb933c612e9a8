"""Redundancy of fleets of disks that follows their failure rates (PACEMAKER, HeART, Tiger)."""
