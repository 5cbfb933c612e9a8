"""Measurements of the input side, and the check that a loader resumes exactly."""
