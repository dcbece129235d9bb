"""Options of ringloader's loader: their table, their checks, and where a loader keeps them."""
