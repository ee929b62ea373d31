"""What the prototype layer costs next to the bare network: one measurement a file, each ratio taken in one run."""
