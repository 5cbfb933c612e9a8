"""Reading what was stored: parts, remote copies, what is mended."""
