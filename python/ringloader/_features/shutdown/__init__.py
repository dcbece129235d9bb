"""``DataLoader.shutdown``: the end of the iterators that a loader has made."""
