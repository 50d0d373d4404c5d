"""What a run writes: its folder, progress, trackers, model card."""
