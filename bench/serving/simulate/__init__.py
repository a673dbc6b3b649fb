"""Capacity by simulation: the number of machines that a load needs, and the effects of routing and cache tiers."""
