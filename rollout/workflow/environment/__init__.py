"""Environments: what an episode of several turns talks to. A recipe names one by import path."""

from slipstream.rollout.workflow.environment.contract import Action, Environment, Step
from slipstream.rollout.workflow.environment.environment_pool import EnvironmentPool
from slipstream.rollout.workflow.environment.tools import ToolEnvironment, ToolError

__all__ = ["Action", "Environment", "EnvironmentPool", "Step", "ToolEnvironment", "ToolError"]
