"""How a checkpoint becomes visible: drafts, the commit record, in a folder or a bucket."""
