"""Runs that are broken on purpose, and what ``slipstream diagnose`` says of each.

case (cases, plugins) ──► real run of the quickstart ──► Evidence ──► likely causes ──► the cause, by hand
                                                                     └──► saved/ ──► the unit test

``python -m tests.diagnoses`` makes the runs, and prints each diagnosis.
"""
