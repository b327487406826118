"""Mystery Path."""
