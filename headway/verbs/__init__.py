"""One file per verb of the command: open, call the rooms, print. No arithmetic here."""
