"""Examples kept in memory in their encoded, decoded or augmented form (CoorDL, Seneca)."""
