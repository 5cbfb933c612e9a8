"""Policies: plain functions from the state of a queue to a decision, in one literal table."""
