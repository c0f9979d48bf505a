"""Shows people a run while it goes on: pages of HTML, progress, numbers in words."""
