"""SimA: l1-normalised attention without exp."""
