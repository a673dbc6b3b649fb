"""Sequences and blocks outside of the KV store: session files, tiers."""
