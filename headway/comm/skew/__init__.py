"""Loose synchronisation: ranks whose replicas drift apart within a rule, and a controller of the rule (SkewScout)."""
