"""Many pictures predicted into one file."""
