"""Non-maximum suppression of many lists of boxes at once."""
