"""Features: a folder for each, their list, and the table of options."""
