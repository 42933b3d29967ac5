"""Megatron shards <-> HF weights, and their way into the engines.

Imports neither Ray nor ``rollout`` nor ``backend``: engines come in as objects that answer the protocol
in ``publish``.
"""
