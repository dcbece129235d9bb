"""Generated cases: arguments by datasets by samplers by kinds of batches, through torch, rings and native control."""
