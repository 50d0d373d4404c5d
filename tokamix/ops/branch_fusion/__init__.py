"""The fusion of active token mixing: three branches, weighted per channel and image."""
