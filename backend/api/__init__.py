"""Asynchronous RL training of language models."""
