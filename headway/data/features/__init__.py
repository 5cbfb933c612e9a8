"""What examples are made of: jagged features and sessions (RecD), examples worth training on (Selective-Backprop)."""
