"""The functions that make a batch of samples; their public names are a module's of their own."""
