"""STViT's operators: sparse association of tokens with super tokens."""
