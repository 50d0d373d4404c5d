"""Context broadcasting: the average token added back."""
