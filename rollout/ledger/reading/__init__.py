"""Reads a ledger: the history of a run, and the groups and turns with which a restart goes on."""
