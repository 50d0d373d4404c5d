"""Paste masks predicted inside boxes into the image."""
