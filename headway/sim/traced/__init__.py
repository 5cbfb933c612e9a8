"""A trace of any source as a Dag: what was observed, and the edges that follow."""
