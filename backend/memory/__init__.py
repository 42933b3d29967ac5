"""Memory of a recipe's GPUs, by arithmetic alone: no model is loaded and no library of tensors is imported.

parameters    elements that a trainer rank holds, and the padding of Megatron's buffers
activations   bytes that a forward pass keeps for the backward pass
pipeline      micro-batches that a pipeline stage holds at the same time
trainer       a rank of each pipeline stage: weights, gradients, optimizer, activations, transfer
engine        a rank of an engine: weights, KV cache, transfer
verdict       what does not fit into the memory of a GPU

All sizes are in bytes unless a name says otherwise; 1 GiB is 2**30 bytes.
"""
