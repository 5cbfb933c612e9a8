"""The allocation problems of a queue as linear programs."""
