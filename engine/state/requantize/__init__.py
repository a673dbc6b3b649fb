"""Blocks with more bits while there is room for them: their places, and when they are requantized."""
