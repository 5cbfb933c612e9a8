"""Why a run took as long as it did: opened, booked, replayed, explained, and planned for."""
