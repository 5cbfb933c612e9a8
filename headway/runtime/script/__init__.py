"""What can be seen of the user's script: its objects, lines, loops, generators, samplers, gradients, saves."""
