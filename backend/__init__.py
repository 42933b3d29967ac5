"""The training side, and the run itself: Megatron, objectives, loops, monitoring, the command line."""
