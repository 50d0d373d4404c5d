"""Masks drawn inside boxes, put into the image."""
