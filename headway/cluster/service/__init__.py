"""A service that shares devices among submitted training scripts, by the rounds and policies of the simulation."""
