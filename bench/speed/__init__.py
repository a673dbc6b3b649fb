"""Tokens a second."""
