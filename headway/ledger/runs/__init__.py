"""The ledger of a recorded run: attempts, windows of a device, loaders."""
