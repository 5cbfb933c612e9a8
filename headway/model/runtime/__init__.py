"""Changes of a model, as they act on modules (torch is imported only from here down)."""
