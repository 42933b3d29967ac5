"""One driver at a time for a run folder."""
