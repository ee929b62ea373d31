"""Passes over images with a network that does not learn."""
