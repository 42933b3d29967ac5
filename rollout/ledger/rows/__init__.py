"""The rows of a ledger about samples and turns, and the segments that these need."""
