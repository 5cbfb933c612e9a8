"""From a training job's state to an image in memory, and on to its agent. With torch."""
