"""The loops of a run, and what ends them."""
