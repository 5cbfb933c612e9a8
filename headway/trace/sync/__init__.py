"""Clocks of several ranks put on one: meetings, causality, drift."""
