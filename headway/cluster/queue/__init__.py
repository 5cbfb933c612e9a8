"""A queue of jobs: its model, the engine that plays it through, its logs, what policies make of it."""
