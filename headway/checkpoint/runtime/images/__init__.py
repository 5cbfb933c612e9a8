"""What a rank keeps of a state: images in memory and in files, their cuts, snapshots of a device."""
