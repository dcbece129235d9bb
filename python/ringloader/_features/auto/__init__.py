"""``num_workers="auto"``: how many workers a loader has, by what is measured."""
