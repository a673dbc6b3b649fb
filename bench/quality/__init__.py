"""What cache types cost."""
