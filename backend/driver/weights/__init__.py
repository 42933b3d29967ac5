"""The trainer and its weights: checkpoints, publications, and what becomes of a trainer that dies."""
