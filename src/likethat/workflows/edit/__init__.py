"""Corrections by a person who knows the subject."""
