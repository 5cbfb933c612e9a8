"""What begins in each rank before the script does: hooks, patches, remedies, windows, annotations."""
