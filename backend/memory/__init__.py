"""Memory of a recipe's GPUs, by arithmetic alone: no model is loaded and no library of tensors is imported.

parameters      elements that a trainer rank holds, and the padding of Megatron's buffers
activations     bytes that a forward pass keeps for the backward pass
trainer_memory  a rank of each pipeline stage: weights, gradients, optimizer, activations, transfer
engine_memory   a rank of an engine: weights, KV cache, transfer
verdict         the parts of a recipe that do not fit into the memory of a GPU; the bytes of a checkpoint
relief          the settings that free memory where a run has run out of it

All sizes are in bytes unless a name says otherwise; 1 GiB is 2**30 bytes.
"""
