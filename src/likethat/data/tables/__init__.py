"""Data sets that a table lists: CSV, TSV or Parquet, a row for every picture."""
