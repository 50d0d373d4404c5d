"""Images with one label each, for classification."""
