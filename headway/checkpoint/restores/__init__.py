"""From a checkpoint back into live objects, on any layout. With torch."""
