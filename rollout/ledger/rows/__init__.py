"""What the rows of a ledger say of samples and turns, and which segments they need."""
