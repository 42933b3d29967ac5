"""What a ledger holds: the history of a run, and what a restart goes on with."""
