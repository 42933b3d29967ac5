"""The checkpoints of a run on disk.

folder             the folder of all checkpoints: begin, commit, find the latest sound one, prune
manifest           the file that describes one checkpoint, and the check of its files against it
node_folder        shares on the disk of a node, for restarts within the job
watermarks         whether the checkpoints belong to the ledger
checkpoint_errors  CheckpointError, and messages for errors of the disk
"""
