"""What a person sees: terminal screens and one self-contained HTML page. Computes nothing, decides nothing."""
