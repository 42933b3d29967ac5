"""Decides which groups may start and which may be trained, and accounts for every group."""
