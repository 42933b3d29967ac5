"""The contract between a workflow and an environment: plain data and one Protocol."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from slipstream.rollout.tokens.trajectory import Finish, Messages, Prompt


@dataclass(frozen=True)
class Action:
    """One turn of the policy."""

    text: str
    """Everything that was sampled, stop texts included, without the token that ends the turn."""
    finish: Finish


@dataclass(frozen=True)
class Step:
    """The reaction of an environment to an action."""

    messages: Messages = field(default_factory=Messages)
    """Messages after the action, for the next prompt. Not read if the episode ends here."""
    reward: float | None = None
    """Reward of this turn alone (``actor.turns``); None: it has none."""
    is_done: bool = False
    """The episode ends here."""
    is_truncated: bool = False
    """The episode ends here because of a limit of the environment."""
    answer: Mapping[str, Any] | None = None
    """The action as a message with its reasoning and its calls apart, for templates that write them. None:
    its text is the message."""


class Environment(Protocol):
    """A world in which episodes happen, one at a time. Any class with these methods is one.

        class GuessNumber:
            async def reset(self, prompt: Prompt) -> Messages:
                self._number = int(prompt.label)
                return prompt.messages()

            async def step(self, action: Action) -> Step:
                if action.text.strip() == str(self._number):
                    return Step(reward=1.0, is_done=True)
                return Step([{"role": "user", "content": "No."}], reward=0.0)

            async def close(self) -> None: ...

    The methods run on the collector's event loop and must not block it. An exception ends the attempt at the
    episode, which is run again with an environment that is new. ``reset`` may be called again after an
    episode has ended: environments are kept and used again, unless they have ``is_reusable = False``. They
    are closed when their collector ends.
    """

    async def reset(self, prompt: Prompt) -> Messages:
        """Begin an episode. Return the conversation before the first answer."""
        ...

    async def step(self, action: Action) -> Step:
        """Take an action of the policy."""
        ...

    async def close(self) -> None:
        """Give everything back. Nothing is called afterwards."""
        ...
