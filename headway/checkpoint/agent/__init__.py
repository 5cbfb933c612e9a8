"""The process beside a rank that makes its snapshots durable, and the rank's end of it."""
