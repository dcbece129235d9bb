"""Workers on other machines, over Ray."""
