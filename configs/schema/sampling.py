"""How engines sample: the trajectories that are trained, and completions of held-out prompts."""

from typing import Annotated

from pydantic import Field, StringConstraints

from slipstream.configs.schema.base import Section

_WHOLE_VOCABULARY = 1 << 30
"""SGLang's ``top_k`` of a request that sets none."""

NEUTRAL: dict[str, tuple[object, ...]] = {
    "top_p": (1,),
    "top_k": (-1, _WHOLE_VOCABULARY),
    "min_p": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_new_tokens": (0,),
    "beam_width": (1,),
    "logit_bias": ({},),
    "json_schema": ("",),
    "regex": ("",),
    "ebnf": ("",),
    "structural_tag": ("",),
}
"""Sampling parameters that change the distribution, under SGLang's names, and the values with which they
change nothing. None always does that.

Response formats and forced tool calls of clients arrive as one of the grammars.
"""

StopText = Annotated[str, StringConstraints(min_length=1)]


class SamplingConfig(Section):
    """How the behaviour policy samples. The trainer computes log-probs of the whole distribution, so
    parameters that change the distribution are refused: docs/data.md#sampling says what stops, seeds and
    further parameters do to the tokens that are trained."""

    temperature: float = Field(
        default=1.0,
        gt=0,
        description="Temperature of the softmax. Log-probs are those of the distribution at this "
        "temperature.",
    )
    top_p: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Must be 1: no truncation by probability. "
        "The engine's log-probs are those of the whole distribution, and truncation would make every "
        "importance weight wrong.",
    )
    top_k: int = Field(default=-1, description="Must be -1: the whole vocabulary, for the reason of `top_p`.")
    max_new_tokens: int = Field(default=1024, ge=1, description="Largest number of tokens of a completion.")
    min_new_tokens: int = Field(
        default=0,
        ge=0,
        description="Number of tokens before which no end token is sampled: its probability is 0 until "
        "then. More than 0 needs `actor.use_decoupled_loss`, whose importance weight corrects the change "
        "of the distribution.",
    )
    stop: list[StopText] = Field(
        default=[],
        max_length=32,
        description="Texts that end a completion. The last token of the completion is the one that "
        "completes such a text.",
    )
    stop_token_ids: list[int] = Field(
        default=[], description="Token ids that end a completion, beside the model's own end tokens."
    )
    ignore_eos: bool = Field(
        default=False,
        description="Continue after end tokens: every completion has `max_new_tokens` tokens, unless a "
        "stop ends it.",
    )
    seed: int | None = Field(
        default=None,
        ge=0,
        description="Seed from which each request gets a seed of its own. Needs `rollout.engine.args: "
        "{enable_deterministic_inference: true}`, and GPUs. null: completions cannot be repeated.",
    )
    args: dict[str, object] = Field(
        default={},
        description="Further fields of SGLang's SamplingParams, under their own names. "
        "Penalties, `min_p`, `logit_bias`, grammars and `custom_params` are refused: the engine would "
        "sample from another distribution than the one whose log-probs the trainer computes.",
    )


class EvalSamplingConfig(Section):
    """How completions of held-out prompts are sampled: greedily, unless `temperature` is above 0. A setting
    that is null has the value of `rollout.sampling`. These completions are never trained, so the distribution
    may be truncated or changed."""

    temperature: float = Field(
        default=0.0, ge=0, description="Temperature of the softmax; 0: always the likeliest token."
    )
    top_p: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Sample from the likeliest tokens whose probabilities add up to this number.",
    )
    top_k: int = Field(
        default=-1, description="Number of likeliest tokens to sample from; -1: the whole vocabulary."
    )
    max_new_tokens: int | None = Field(
        default=None, ge=1, description="Largest number of tokens of a completion."
    )
    min_new_tokens: int | None = Field(
        default=None, ge=0, description="Number of tokens before which no end token is sampled."
    )
    stop: list[StopText] | None = Field(
        default=None, max_length=32, description="Texts that end a completion."
    )
    stop_token_ids: list[int] | None = Field(default=None, description="Token ids that end a completion.")
    ignore_eos: bool | None = Field(default=None, description="Continue after end tokens.")
    args: dict[str, object] | None = Field(
        default=None,
        description="Further fields of SGLang's SamplingParams. Those that change the distribution, such as "
        "`min_p` and `frequency_penalty`, are allowed here.",
    )

    def over(self, training: SamplingConfig) -> SamplingConfig:
        """Return the sampling of evaluations: ``training``, with the settings that this section gives.

        The temperature 0 is replaced by that of training: callers ask the engines for greedy sampling."""
        given = {name: value for name, value in self if value is not None and name != "temperature"}
        given["temperature"] = self.temperature or training.temperature
        return training.model_copy(update=given)

    @property
    def is_greedy(self) -> bool:
        """True if the likeliest token is always taken."""
        return self.temperature == 0
