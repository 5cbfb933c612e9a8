"""The drop-in loader, pipelines, and the client of a data server."""
