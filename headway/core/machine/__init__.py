"""This host: cores, memory, load, shared memory, machine code."""
