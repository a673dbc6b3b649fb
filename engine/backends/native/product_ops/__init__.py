"""Ops on weights: loading, products, and mixtures of experts."""
