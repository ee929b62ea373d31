"""The paper's Table 1 for any data set: what `likethat reproduce` does."""

# Options of training that a study sets for each of its runs.
OWN_OPTIONS = ("seed", "backbone", "weights", "full_images", "from_baseline")
