"""What each stage leaves for the next one, as files."""
