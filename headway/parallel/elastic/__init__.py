"""Pipelines that lost workers train on: their microbatches go to the data-parallel peers (SlipStream)."""
