"""Measurements of a server under load."""
