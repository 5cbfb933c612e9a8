"""The process beside a rank that writes, answers and outlives it."""
