"""SGLang's own /generate, for programs that send ids: one prompt or several, text or ids. Imports SGLang."""

from collections.abc import AsyncIterator

import orjson
from pydantic import BaseModel, ConfigDict, Field, model_validator

from slipstream.rollout.gateway.serving.answering import as_batch
from slipstream.rollout.gateway.serving.call import LiveCall
from slipstream.rollout.gateway.serving.contents import Content, Form
from slipstream.rollout.gateway.serving.limits import Refusal
from slipstream.rollout.gateway.serving.replies import Result
from slipstream.rollout.gateway.serving.stand_in import StandIn


class SamplingBody(BaseModel):
    """``sampling_params`` of a request: all that an engine takes, except those that run code on it."""

    model_config = ConfigDict(strict=True, extra="forbid")

    max_new_tokens: int | None = Field(default=None, ge=0)
    min_new_tokens: int | None = Field(default=None, ge=0)
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    sampling_seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    stop_regex: str | list[str] | None = None
    ignore_eos: bool | None = None
    regex: str | None = None
    ebnf: str | None = None
    json_schema: str | None = None
    structural_tag: str | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: bool | None = None


class GenerateBody(BaseModel):
    """A request to /generate."""

    model_config = ConfigDict(strict=True)

    text: str | list[str] | None = None
    input_ids: list[int] | list[list[int]] | None = None
    sampling_params: SamplingBody = Field(default_factory=SamplingBody)
    return_logprob: bool = False
    top_logprobs_num: int = Field(default=0, ge=0, le=20)
    logprob_start_len: int = -1
    return_text_in_logprobs: bool = False
    stream: bool = False

    @model_validator(mode="after")
    def _has_one_prompt(self) -> "GenerateBody":
        if (self.text is None) == (self.input_ids is None) or self.text == []:
            raise ValueError("expected either text or input_ids")
        if self.logprob_start_len not in (-1, 0):
            raise ValueError("logprob_start_len: expected 0, for the log-probs of the whole prompt, or -1")
        return self

    @property
    def scores_prompt(self) -> bool:
        return self.return_logprob and self.logprob_start_len == 0

    @property
    def is_batch(self) -> bool:
        prompt = self.text if self.text is not None else self.input_ids
        return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], list | str)


class Native:
    """Answers /generate."""

    def __init__(self, stand_in: StandIn) -> None:
        self._stand_in = stand_in

    async def answer(self, call: LiveCall, body: GenerateBody) -> Result:
        top = body.top_logprobs_num if body.return_logprob else 0
        sampling = body.sampling_params.model_dump(exclude_none=True)
        try:
            prepared = await call.prepared(lambda: list(self._prompts(call, body)))
            for prompt in [call.prompt(ids, text=text) for text, ids in prepared]:
                call.begin(prompt, sampling, top_logprobs=top, scores_prompt=body.scores_prompt)
        except ValueError as error:
            raise Refusal(400, str(error)) from error
        form = Form(call.answer_id, body.stream, body.return_logprob, top, prompt_ids=False)
        if body.stream:
            return self._events(call, form)
        contents = await anext(call.contents(form))
        await self._record(call)
        single = not body.is_batch and isinstance(contents, dict)
        return contents if single else contents if isinstance(contents, list) else [contents]

    def _prompts(self, call: LiveCall, body: GenerateBody):
        if body.text is not None:
            for text in [body.text] if isinstance(body.text, str) else body.text:
                call.check_length(len(text))
                yield text, self._stand_in.encode(text)
        else:
            for ids in as_batch(body.input_ids):
                yield None, ids

    async def _events(self, call: LiveCall, form: Form) -> AsyncIterator[str]:
        """Yield each answer so far, whenever it has grown: SGLang repeats what it has sent before."""
        so_far: dict[int, Content] = {}
        async for part in call.contents(form):
            assert isinstance(part, dict)
            index = part.pop("index")
            whole = so_far.setdefault(index, {"text": "", "output_ids": []})
            meta, before = part["meta_info"], whole.get("meta_info", {})
            for name in ("output_token_logprobs", "output_top_logprobs"):
                if name in meta:
                    meta[name] = before.get(name, []) + meta[name]
            for name in ("input_token_logprobs", "input_top_logprobs"):
                if name in before:
                    meta[name] = before[name]
            whole |= {
                "text": whole["text"] + part["text"],
                "output_ids": whole["output_ids"] + part["output_ids"],
                "meta_info": meta,
            }
            shown = {**whole, "index": index} if len(call.answers) > 1 else whole
            yield f"data: {orjson.dumps(shown).decode()}\n\n"
        await self._record(call)
        yield "data: [DONE]\n\n"

    async def _record(self, call: LiveCall) -> None:
        await call.record([{"role": "assistant", "content": answer.text} for answer in call.answers])
