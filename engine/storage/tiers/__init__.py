"""Tiers: stored K/V outside of the KV store, so that no prompt is computed twice."""
