"""What an episode does. A workflow is any class with this one method, named by import path."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from slipstream.configs.schema import SamplingConfig
from slipstream.rollout.reward import Reward
from slipstream.rollout.trajectory import Completion, Messages, Prompt, Trajectory
from slipstream.rollout.workflow.single_turn import SingleTurn

__all__ = ["Generator", "SingleTurn", "Tokenizer", "Workflow", "WorkflowContext"]


class Generator(Protocol):
    """Continues token ids. Survives weight updates and engine restarts."""

    async def generate(self, input_ids: Sequence[int], sampling: SamplingConfig) -> Completion: ...


class Tokenizer(Protocol):
    """What workflows need of an HF tokenizer."""

    def apply_chat_template(self, conversation: Messages, **kwargs: Any) -> Any: ...
    def decode(self, token_ids: Sequence[int], **kwargs: Any) -> str: ...


@dataclass(frozen=True, slots=True)
class WorkflowContext:
    """What an episode may use."""

    generator: Generator
    tokenizer: Tokenizer
    reward: Reward
    sampling: SamplingConfig


class Workflow(Protocol):
    async def run(self, prompt: Prompt, context: WorkflowContext) -> Trajectory:
        """One episode, judged: the trajectory's ``reward`` is set.

        Raise when the episode fails for a reason outside the policy; it is tried again, then counted as
        ``failed``. It is cancelled when it outlasts ``rollout.episode_timeout_s``.
        """
        ...
