"""What the prototype layer costs next to the bare network: each ratio is taken in one run."""
