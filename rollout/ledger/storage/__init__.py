"""The files of a ledger: the database, its stamp and its write-ahead log, and the segments of payload."""
