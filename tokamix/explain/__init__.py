"""Pictures of what a model looks at."""
