"""The settings that every endpoint of the policy has: how it speaks with its clients."""

from typing import Literal

from pydantic import Field

from slipstream.configs.schema.base import PathSetting, Section


class DialectConfig(Section):
    """How an endpoint reads and writes for the policy."""

    tool_parser: str | None = Field(
        default="auto",
        description="SGLang's parser of the policy's tool calls, such as `qwen25` or `llama3`. `auto`: the "
        "parser that the chat template suggests, if any. null: tool calls stay text.",
    )
    reasoning_parser: str | None = Field(
        default=None,
        description="SGLang's parser of the policy's reasoning, such as `qwen3` or `deepseek-r1`. `auto`: "
        "the parser that the chat template suggests, if any. null: reasoning stays text.",
    )
    chat_template: PathSetting | None = Field(
        default=None, description="File with a Jinja chat template; null: the tokenizer's own template."
    )
    sampling: Literal["client", "recipe"] = Field(
        default="client",
        description="Treatment of sampling parameters that the trainer cannot reproduce. `client`: they "
        "are used, and the turn is not trained. `recipe`: turns of the type `main` are sampled with "
        "`rollout.sampling` instead.",
    )
    hosted_tools: Literal["drop", "refuse"] = Field(
        default="drop",
        description="Treatment of tools that a provider would run, such as a web search. `drop`: they are "
        "left out of the prompt, and named in the header `X-Slipstream-Dropped-Tools`. `refuse`: HTTP 400.",
    )
    contents: Literal["mark", "refuse"] = Field(
        default="mark",
        description="Treatment of images, documents and other contents that are no text. `mark`: a text "
        "like `[image]` stands for them in the prompt. `refuse`: HTTP 400.",
    )


class EndpointConfig(DialectConfig):
    """How the endpoint of each collector speaks for the policy, where a workflow has agents talk to it
    (docs/agents.md). It serves OpenAI's and Anthropic's protocols and SGLang's own, on loopback. The section
    is refused with a workflow that has no use for it."""
