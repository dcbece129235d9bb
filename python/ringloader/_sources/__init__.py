"""Samplers that are read natively."""
