"""The forward pass and the weights that it takes."""
