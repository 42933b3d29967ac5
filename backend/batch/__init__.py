"""The data of a training step, as numpy arrays. Pure: no torch, no processes, no clocks.

train_batch        the batch of a step, and the check of its staleness
packing            which trajectories go into which micro-batch of which rank
prefixes           ... and which of them compute a beginning that they share once
flops              what a trajectory costs the model: what packing evens out
micro_batch        trajectories packed into one sequence
saved              a batch as a file
skipped            an optimizer update that was skipped, and why
context_parallel   how the ranks of a context-parallel group share a micro-batch
"""
