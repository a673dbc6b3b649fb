"""What a model needs where the memory of one GPU is too small for it."""
