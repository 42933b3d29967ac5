"""Which groups may start and which may be trained: the bound on staleness, and the account of all work."""
