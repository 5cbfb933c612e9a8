"""Pipelines that run: any program of messages and updates, on the versions of the weights that it asks for."""
