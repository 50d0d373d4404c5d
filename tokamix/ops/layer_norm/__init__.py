"""LayerNorm that writes autocast's dtype."""
