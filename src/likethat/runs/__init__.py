"""Run folders: their layout, and finished runs loaded from them."""
