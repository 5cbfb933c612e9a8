"""The same account while a run goes on."""
