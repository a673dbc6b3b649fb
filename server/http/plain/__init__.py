"""Endpoints of our own: sessions, tokens, blocks, status and metrics."""
