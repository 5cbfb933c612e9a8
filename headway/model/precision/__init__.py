"""QSync: precision per operator and per rank, where ranks are unlike."""
