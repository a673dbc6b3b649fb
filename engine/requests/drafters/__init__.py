"""Drafters: each file guesses the next tokens of a request in one way."""
