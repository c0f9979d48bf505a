"""What planner and ranks both know: which types of models can do what."""
