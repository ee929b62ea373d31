"""Fewer prototypes and connections after training."""
