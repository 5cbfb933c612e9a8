"""Worker processes that prepare a dataset for all ranks of a job."""
