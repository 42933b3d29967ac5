"""What the command line shows and converts: plans, audits, checkpoints, this machine."""
