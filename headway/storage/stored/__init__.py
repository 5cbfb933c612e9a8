"""Stored bytes: files that are whole or not there, buckets, digests, manifests, places of damage."""
