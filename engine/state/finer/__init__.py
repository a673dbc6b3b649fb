"""Blocks with more bits while there is room for them: their places, which are coded again, and when."""
