"""What a run leaves on an object store, and how another machine goes on from there."""
