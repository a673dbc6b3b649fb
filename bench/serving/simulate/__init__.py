"""Capacity by simulation: how many machines a load needs, and what routing and the tiers of the cache change."""
