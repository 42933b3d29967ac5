"""Megatron-Core: parallel groups, model, optimizer, and support for machines without a GPU."""
