"""The workflow with one prompt and one completion."""

from slipstream.rollout.tokens.trajectory import Prompt, Trajectory, TrajectoryBuilder
from slipstream.rollout.workflow.contract import WorkflowContext


class SingleTurn:
    """Applies the chat template and generates one completion, which the recipe's reward then judges."""

    async def run(self, prompt: Prompt, context: WorkflowContext) -> Trajectory:
        prompt_ids = context.tokenizer.apply_chat_template(
            prompt.messages(), add_generation_prompt=True, return_dict=False
        )
        completion = await context.generator.generate(prompt_ids, context.sampling)
        builder = TrajectoryBuilder(prompt_ids)
        builder.add_completion(completion)
        return builder.build()
