"""Labels that the evidence contradicts."""
