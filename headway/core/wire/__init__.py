"""Messages between processes and hosts: channels, tokens, leases, rates."""
