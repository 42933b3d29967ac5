"""The generation side: engines, workflows, rewards, and the control of what may start and be trained.

Never imports Megatron or ``backend``.
"""
