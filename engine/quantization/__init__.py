"""Precise codes of K/V: conditioning before a codec, the cost of errors, and encoders that minimize it."""
