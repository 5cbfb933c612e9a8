"""What follows a failure: who is to blame, how attempts are supervised, a process kept warm."""
