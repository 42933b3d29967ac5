"""The folder of a run's checkpoints."""
