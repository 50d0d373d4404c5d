"""ATMNet's operator: per-channel gather along one axis."""
