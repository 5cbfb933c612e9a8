"""Nonuniform tensor parallelism: a tensor-parallel group that lost devices trains on with those that remain (NTP)."""
