"""The forward pass, its weights, and scoring."""
