"""Data sets: what lies where (dataset), what is wrong with it (check), and its pixels (decode, cache)."""

from likethat.data.dataset import DataSet, Sample, open_dataset

__all__ = ["DataSet", "Sample", "open_dataset"]
