"""What planner and ranks both know: what strategies and types of models can do."""
