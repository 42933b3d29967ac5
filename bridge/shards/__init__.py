"""The way between the trainer's shards and HF tensors.

plan    which rank sends which part of which HF tensor, in which order; pure
regions regions of HF tensors, in which trainer and engines name their shards; pure
digest  a digest of tensors
check   compare an HF checkpoint with its config, by names and shapes; pure
load_hf HF checkpoint -> the shards of one rank
export  shards of all ranks -> buckets of HF tensors on the sender
adapter which layers have a low-rank adapter, and where its factors are in HF; pure
factors the factors of an adapter between ranks and PEFT's tensors
fp8     engines that hold weights in fp8: what they are sent, and which models they can hold; pure
quantize  buckets of HF tensors -> buckets for such engines
"""
