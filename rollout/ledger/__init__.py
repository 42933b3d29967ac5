"""The durable account of every group and turn: no prompt is lost, and nothing is trained twice.

storage      the files: database, stamp, write-ahead log, segments of payload
lineage      the tree of versions
rows         what rows say of samples and turns, and which segments they need
lease        one driver at a time for a run folder
reading      the history of a run, and what a restart goes on with, checked byte by byte
writing      the ledger of a running run: events go in, and one thread commits them
recovery     opens the ledger, a new one or that of a run that goes on
audit        recounts everything with code of its own
episode_log  every episode as text

The driver alone writes, in one thread (`writing/store.py`): each transaction puts its payload on disk, and
commits the rows that point to it. A kill -9 in between leaves payload that no row knows. `recovery` deletes
it, and what it held is generated again, or sent again by a gateway that has no acknowledgement.
"""
