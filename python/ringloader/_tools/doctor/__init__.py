"""``ringloader.doctor()``: the surroundings of a loader, and their rate."""
