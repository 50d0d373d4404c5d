"""Features of images, and search among them."""
