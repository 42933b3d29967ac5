"""A workflow of many short answers, so that a kill finds every episode in the middle, and a reward for it."""

from dataclasses import replace

from slipstream.rollout.tokens.trajectory import Prompt, Trajectory, TrajectoryBuilder
from slipstream.rollout.workflow import WorkflowContext

TURNS = 12


class ManyTurns:
    """Asks on and on, and rewards each answer; behind it comes one token of context."""

    async def run(self, prompt: Prompt, context: WorkflowContext) -> Trajectory:
        builder = TrajectoryBuilder(context.tokenizer.encode(prompt.prompt))
        sampling = context.sampling.model_copy(update={"max_new_tokens": 8})
        for _ in range(TURNS):
            builder.add_completion(await context.generator.generate(builder.tokens, sampling))
            builder.reward_turn(float(builder.tokens[-1] % 2))
            builder.add_context(builder.tokens[:1])
        trajectory = builder.build()
        return replace(trajectory, reward=await context.reward.score(prompt, "", trajectory))


class Signed:
    """Rewards of which hardly any mean lies between 0 and 1."""

    async def score(self, prompt: Prompt, response: str, trajectory: Trajectory) -> float:
        return -3.0 if int(trajectory.tokens_T.sum()) % 2 else 1.0
