"""Visual explanations of models."""
