"""Recounts a run from its ledger, with code of its own."""
