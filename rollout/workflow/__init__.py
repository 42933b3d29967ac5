"""Workflows: what an episode does. A recipe names one by import path."""

from slipstream.rollout.tokens.tokenizer import Tokenizer
from slipstream.rollout.workflow.agent import Agent
from slipstream.rollout.workflow.contract import (
    EpisodePlace,
    Generator,
    GroupRejected,
    Judge,
    Workflow,
    WorkflowContext,
)
from slipstream.rollout.workflow.dialogue import Dialogue
from slipstream.rollout.workflow.endpoint import PolicyEndpoint
from slipstream.rollout.workflow.limited import limited
from slipstream.rollout.workflow.multi_turn import MultiTurn, ToolUse
from slipstream.rollout.workflow.single_turn import SingleTurn
from slipstream.rollout.workflow.verifiers import Verifiers

__all__ = [
    "Agent",
    "Dialogue",
    "EpisodePlace",
    "Generator",
    "GroupRejected",
    "Judge",
    "MultiTurn",
    "PolicyEndpoint",
    "SingleTurn",
    "Tokenizer",
    "ToolUse",
    "Verifiers",
    "Workflow",
    "WorkflowContext",
    "limited",
]
