"""Embedded data: field-guide birds whose distinguishing parts are known."""
