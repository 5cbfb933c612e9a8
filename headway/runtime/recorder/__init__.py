"""What a rank records with: its rings and spans, timers of host and device, and when a window is due."""
