"""What the user is told of a loader."""
