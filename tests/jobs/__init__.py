"""Training scripts in the manner of common examples; none of them knows of headway."""
