"""Generates what the trainer learns from: engines, workflows, rewards, and the control of staleness.

Never imports Megatron or ``backend``.
"""
