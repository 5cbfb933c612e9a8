"""What is wrapped around torch's calls, a file per kind, and the table of patches that installs them."""
