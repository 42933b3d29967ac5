"""The way between the trainer's shards and HF tensors.

plan    which rank sends which part of which HF tensor, in which order; pure
check   compare an HF checkpoint with its config, by names and shapes; pure
load    HF checkpoint -> the shards of one rank
export  shards of all ranks -> buckets of HF tensors on the sender
"""
