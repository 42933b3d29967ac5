"""A decoder-only transformer: what it is, how ranks share it, and where its tensors are. Imports no torch.

rope      rotary position embeddings
geometry  sizes and variants of a model, read from an HF config
layout    how the trainer's ranks share a model
mapping   which HF tensors a Megatron parameter holds, and how ranks share it
spec      an HF checkpoint directory with its geometry and its mappings
"""
