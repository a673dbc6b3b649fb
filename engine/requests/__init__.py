"""Requests: from a prompt to chunks of text, many at a time."""
