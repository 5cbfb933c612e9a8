"""torch's own calls: DCP plugins, stagers, torch.save and its files."""
