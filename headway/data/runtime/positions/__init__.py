"""Where a loader stands, and the state from which another one goes on."""
