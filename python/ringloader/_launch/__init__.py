"""How worker processes begin."""
