"""Generated cases: arguments, datasets, samplers and kinds of batches, over each path beside torch."""
