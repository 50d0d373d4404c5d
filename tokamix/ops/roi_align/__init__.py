"""RoIAlign over the levels of a feature pyramid."""
