"""The quality of cache types."""
