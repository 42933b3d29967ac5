"""Two attempts in one episode: a response that gives no answer is followed by a second one."""

from slipstream import Prompt, Trajectory, TrajectoryBuilder, WorkflowContext


class SecondTry:
    def __init__(self, marker: str = "#") -> None:
        self.marker = marker

    async def run(self, prompt: Prompt, context: WorkflowContext) -> Trajectory:
        tokenizer = context.tokenizer
        ids = tokenizer.apply_chat_template(prompt.messages(), add_generation_prompt=True, return_dict=False)
        builder = TrajectoryBuilder(ids)
        first = await context.generator.generate(builder.tokens, context.sampling)
        builder.add_completion(first)
        if self.marker not in tokenizer.decode(list(first.tokens), skip_special_tokens=True):
            builder.add_context(ids)  # the question once more: tokens that carry no loss
            builder.add_completion(await context.generator.generate(builder.tokens, context.sampling))
        return builder.build()
