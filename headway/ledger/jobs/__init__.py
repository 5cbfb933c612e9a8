"""Hangs, machines, groups: what ranks wait for."""
