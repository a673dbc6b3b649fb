"""Measurements that the makers of this engine run, in a checkout; README.md says which."""

FIRST_TOKEN, BETWEEN_TOKENS = "first token", "between two tokens"  # quantities of a server's clients, in seconds
