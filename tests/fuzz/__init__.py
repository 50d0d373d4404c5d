"""Random inputs: `make fuzz`. Not part of `make test`, which runs a few of them."""
