"""Pure functions on tensors: log-probs, advantages, ratios, losses. No process state but the groups given.

Legend: T tokens of a pack or batch, N trajectories, V vocabulary.
"""
