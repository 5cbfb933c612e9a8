"""A recorded run as a program: lanes, loaders, device work, what a replay of it takes."""
