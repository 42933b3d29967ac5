"""The trainer and its weights: checkpoints, publications, and what becomes of a trainer that dies.

ranked_trainer   the ranks as one object; ``batch_saver`` is the trainer of a run that trains nothing
skipped          updates that it has left out
served_weights   steps and publications, one at a time; engines that start get the current version.
                 Whether the trainer lives
transports         ... by the recipe's transport, or the next one
verification       ... and whether engines hold what was sent
checkpointing    when a checkpoint is taken
revival          starts a dead trainer again
interrupted        ... what becomes of engines in the middle of an update
rewind             ... and of the groups, which go back to the version of the checkpoint
"""
