"""Names that statistics of a training step share with the metrics that are logged. Imports nothing."""

HOOK = "hook/"
"""Prefix of the statistics that a user's hooks name. Each is a sum like the others."""

BATCH = "batch/"
"""Prefix of the metrics that the recipe's ``actor.metrics`` return."""
