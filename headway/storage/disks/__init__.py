"""Fleets of disks: how often they fail, which redundancy they need when, and a simulation day by day."""
