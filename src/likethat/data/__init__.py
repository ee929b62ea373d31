"""Data sets: what lies where (dataset, formats), what is wrong with it (check), and its pixels (decode, cache)."""
