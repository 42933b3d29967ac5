"""The training side, and the run itself: Megatron, objectives, the four loops, monitoring, the command line."""
