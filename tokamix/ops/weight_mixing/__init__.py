"""AMixer's operator: mixing weights composed from a bank."""
