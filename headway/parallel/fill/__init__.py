"""Work of another job in the gaps of a pipeline (PipeFill)."""
