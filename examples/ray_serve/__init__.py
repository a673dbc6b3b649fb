"""Replicas of the engine with Ray Serve."""
