"""Queues from files: Slurm's accounting, Philly, Gavel's jobs and tables, CSV; and Gavel's generator."""
