"""The tokens of an episode whose prompts are made of messages by a chat template.

    dialogue = Dialogue(context)
    completion = await dialogue.complete(messages)          # the whole conversation so far
    ...
    trajectories = dialogue.trajectories()

The ids of a prompt are those of the prompt before and of its completion, then those of what was added:
sampled ids are never decoded and encoded again. Where the template, or the workflow, repeats something in
another way (the reasoning of an earlier answer is removed, a tool call is written otherwise, the context is
compacted), a branch begins, and with it another trajectory. A sampled token carries loss in the first
trajectory that has it.

    prompt 1 | answer 1 | added | answer 2                      trajectory 1: answers 1 and 2 carry loss
    prompt 1 | answer 1'| added                  | answer 3     trajectory 2: answer 3 does
"""

from collections.abc import Mapping, Sequence

from slipstream.configs.schema import SamplingConfig
from slipstream.rollout.engine.context import InvalidRequest
from slipstream.rollout.tokens.conversation.chains import (
    Segment,
    append,
    closing_of,
    continue_text,
    ids_of,
    segments_of,
)
from slipstream.rollout.tokens.tokenizer import said
from slipstream.rollout.tokens.trajectory import Completion, Finish, Messages, Trajectory, TrajectoryBuilder
from slipstream.rollout.workflow.contract import WorkflowContext


class Dialogue:
    """Prompts and completions of one episode, in order."""

    def __init__(self, context: WorkflowContext, template: Mapping[str, object] | None = None) -> None:
        """``template``: settings of the chat template, such as ``tools``."""
        self._context = context
        self._template = dict(template or {})
        self._closing = closing_of(lambda messages: self._rendered(messages, answer=False))
        self._tail: Segment | None = None
        """The chain up to the last completion."""
        self._completions: dict[int, tuple[Segment, Completion]] = {}
        """Completions by the identities of their segments."""
        self._rewards: dict[int, float] = {}
        """Rewards of turns by the identities of their segments."""
        self._finish = Finish.STOP
        self._ends: list[Segment] = []
        """Ends of the branches that were left."""

    @property
    def has_begun(self) -> bool:
        """True if something was sampled."""
        return self._tail is not None

    @property
    def is_cut_off(self) -> bool:
        """True if the last completion has ended by its length."""
        return self._finish is Finish.LENGTH

    def prompt(self, messages: Messages) -> Segment | None:
        """Return the chain of a prompt, whose ids are those of the chain so far wherever it repeats them."""
        text = self._rendered(messages)
        extended = continue_text(
            self._tail,
            text,
            lambda text: self._context.tokenizer.encode(text, add_special_tokens=False),
            lambda ids: self._context.tokenizer.decode(list(ids)),
            self._closing,
        )
        return extended.tail

    def is_continued_by(self, messages: Messages) -> bool:
        """True if the prompt of a conversation repeats everything so far. Raises what the template raises."""
        return self._tail in segments_of(self.prompt(messages))

    async def complete(
        self, messages: Messages, sampling: SamplingConfig | None = None, *, prompt: Segment | None = None
    ) -> Completion:
        """Generate the answer to a conversation. ``prompt``: its chain, if it is known already.

        Where the context has no room for ``sampling.max_new_tokens``, the answer gets the room that is left.
        Raises InvalidRequest, whose ``room`` is 0, where none is left.
        """
        tail = prompt or self.prompt(messages)
        completion = await self._generated(ids_of(tail), sampling or self._context.sampling)
        if self._tail is not None and self._tail not in segments_of(tail):
            self._ends.append(self._tail)
        answer = {"role": "assistant", "content": self.text(completion)}
        self._tail = append(tail, completion.tokens, None, answer, completion.finish)
        self._completions[id(self._tail)] = (self._tail, completion)
        self._finish = completion.finish
        return completion

    async def _generated(self, ids: Sequence[int], sampling: SamplingConfig) -> Completion:
        try:
            return await self._context.generator.generate(ids, sampling)
        except InvalidRequest as error:
            if not error.room:
                raise
            left = {
                "max_new_tokens": error.room,
                "min_new_tokens": min(sampling.min_new_tokens, error.room),
            }
            return await self._context.generator.generate(ids, sampling.model_copy(update=left))

    def text(self, completion: Completion) -> str:
        """Return what a completion says: all of its text, without the token that ends the turn."""
        return said(self._context.tokenizer, completion.tokens, completion.finish, completion.matched)

    def reward_turn(self, reward: float) -> None:
        """Give the last completion a reward of its own."""
        self._rewards[id(self._tail)] = reward

    def trajectories(self) -> list[Trajectory]:
        """Return the trajectory of each branch, in the order in which they ended.

        Raises ValueError if nothing was sampled.
        """
        if self._tail is None:
            raise ValueError("the episode has asked for no completion")
        trained: set[int] = set()
        return [self._trajectory(tail, trained) for tail in (*self._ends, self._tail)]

    def _trajectory(self, tail: Segment, trained: set[int]) -> Trajectory:
        builder: TrajectoryBuilder | None = None
        for segment in segments_of(tail):
            _, completion = self._completions.get(id(segment), (segment, None))
            if builder is None:
                builder = TrajectoryBuilder(segment.ids.tolist())
            elif completion is None or id(segment) in trained:
                builder.add_context(segment.ids.tolist())
            else:
                builder.add_completion(completion)
                trained.add(id(segment))
                if (reward := self._rewards.get(id(segment))) is not None:
                    builder.reward_turn(reward)
        assert builder is not None
        return builder.build()

    # ---- the template

    def _rendered(self, messages: Messages, *, answer: bool = True) -> str:
        return self._context.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=answer, **self._template
        )
