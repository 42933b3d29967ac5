"""The checkpoints of a run on disk.

folder     the folder of all checkpoints: begin, commit, find the latest sound one, prune
manifest   the file that describes one checkpoint, and the check of its files against it
watermarks whether the checkpoints belong to the ledger
disk       checksums and durable writes
errors     CheckpointError, and what to do about errors of the disk
"""
