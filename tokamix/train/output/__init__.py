"""What a run writes and shows: run folder, progress, trackers, model card, curves."""
