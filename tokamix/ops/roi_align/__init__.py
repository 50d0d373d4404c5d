"""RoIAlign over the levels of a pyramid."""
