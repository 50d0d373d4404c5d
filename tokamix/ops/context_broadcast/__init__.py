"""Context broadcasting: add the average token back to every token."""
