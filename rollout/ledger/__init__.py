"""The durable account of every group and turn: no prompt is lost, and nothing is trained twice.

writer       the ledger as the event loop of a run sees it: events go in, chunks are read
transaction  the events of one commit
store        the writer thread: commits, and tidies up
segments     the files of payload
database     the file of everything else: tables, checksums, errors
stamp        how far the database is
log          whether SQLite's log belongs to the database
samples      what the rows say of each sample
holds        which groups need which segments
moves        copies out of segments of which little is needed
turns        how turns of live users are named and stored
turn_log     their events, as the event loop records them
turn_rows    their rows, as the writer thread writes them
turn_contents what a restart finds of them
recovery     opens the ledger, a new one or that of a run that goes on
restart      what every start does, also that of a trainer in a running process
contents     what exists of the groups that go on, checked byte by byte
history      starts, versions, failed steps and checkpoints
lineage      the tree of versions
watermark    how far the ledger is, for checkpoints
audit        recounts everything, with audit_training, audit_payload, audit_turns and records
"""
