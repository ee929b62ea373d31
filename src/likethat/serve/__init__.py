"""The web application: ask, browse and correct a run. FastAPI is imported nowhere else."""
