"""Reads a request's JSON into an engine's prompt, options and sampling parameters."""
