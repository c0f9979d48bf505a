"""Text generation by torch ranks."""
