"""``judge``: who says what turns of live users and whole episodes are worth."""

from typing import Annotated, Literal

from pydantic import Field

from slipstream.configs.schema.base import ModelSetting, Section
from slipstream.configs.schema.plugin import Plugin, PluginConfig


class KeyedServer(Section):
    """A server that may ask for a key."""

    key_env: str | None = Field(
        default=None,
        min_length=1,
        description="Environment variable with the key of the server; null: the server needs none.",
    )


class UrlEndpoint(KeyedServer):
    """A server that speaks OpenAI's chat completions."""

    type: Literal["url"] = "url"
    url: str = Field(
        min_length=1,
        description="Address of the server up to and including the version of its protocol, for example "
        "`https://host/v1`.",
    )
    model: str = Field(min_length=1, description="Name of the model, as the server knows it.")


class PolicyItself(Section):
    """The policy's own engines. Requests go to them directly, so that nothing of the conversation is recorded
    or trained."""

    type: Literal["policy"] = "policy"


class OwnEngines(Section):
    """SGLang engines of the judge's own, on devices of their own. The run starts, watches and ends them.
    Their weights never change."""

    type: Literal["engines"] = "engines"
    path: ModelSetting = Field(description="Hugging Face checkpoint directory of the judge's model.")
    dtype: Literal["bfloat16", "float16", "float32"] = Field(
        default="bfloat16", description="Type of the weights in the engines."
    )
    count: int = Field(default=1, ge=1, description="Number of engines, each of which is a server.")
    tensor_parallel: int = Field(default=1, ge=1, description="Number of tensor-parallel ranks per engine.")
    start_timeout_s: float = Field(
        default=600, gt=0, description="Seconds that an engine may take to start and become healthy."
    )
    answer_timeout_s: float = Field(
        default=20,
        gt=0,
        description="Seconds within which an engine must answer a question about its health, which it gets "
        "every few seconds. An engine that does not answer is started again.",
    )
    args: dict[str, object] = Field(
        default={}, description="Further fields of SGLang's ServerArgs, under their own names."
    )
    untested: list[str] = Field(
        default=[],
        description="Names of fields in `args` that nobody has tried with Slipstream, as in "
        "`rollout.engine.untested`.",
    )


Endpoint = Annotated[UrlEndpoint | PolicyItself | OwnEngines, Field(discriminator="type")]


class ScoringTeacher(Section):
    """A model that gives log-probs to the tokens of an answer."""

    top_k: int = Field(
        default=0,
        ge=0,
        le=1024,
        description="Number of the teacher's likeliest tokens whose log-probs are kept at each position; "
        "0: only those of the sampled tokens.",
    )


class PolicyTeacher(ScoringTeacher):
    """The policy itself, as its engines hold it now. It can teach itself because it sees the hint."""

    type: Literal["policy"] = "policy"


class JudgeTeacher(ScoringTeacher):
    """The judge's own engines (`judge.endpoint.type: engines`), if their model has the policy's tokenizer."""

    type: Literal["judge"] = "judge"


class UrlTeacher(ScoringTeacher, KeyedServer):
    """An SGLang server whose model has the policy's tokenizer."""

    type: Literal["url"] = "url"
    url: str = Field(
        min_length=1,
        description="Address of the server, for example `http://host:30000`.",
    )
    context: int = Field(
        default=32_768, ge=16, description="Largest number of tokens that the server takes in one request."
    )


class LongestHint(Section):
    """The longest hint."""

    type: Literal["longest"] = "longest"


class OverlapHint(Section):
    """The hint with which the teacher's likeliest tokens agree most with the policy's, over all positions of
    the answer."""

    type: Literal["overlap"] = "overlap"
    top_k: int = Field(
        default=8,
        ge=1,
        le=1024,
        description="Number of likeliest tokens of teacher and policy that are compared at each position.",
    )


MODEL = "slipstream.rollout.reward.model"


PromptMaker = Annotated[
    Plugin,
    Field(
        description="Import path of a function that returns the messages of the question. Its parameters are "
        "some of `turn`, `next_state`, `response_text`, `next_state_text` and `next_state_role`."
    ),
]
VoteReader = Annotated[
    Plugin,
    Field(
        description="Import path of a function that reads a vote from the text of an answer: a number, a "
        "pair of number and hint, or a `Vote`; None: the answer is unparsable."
    ),
]


class ModelQuestion(Section):
    """The code that turns a live turn into a question to the model, and each answer into a vote."""

    prompt: PromptMaker
    parser: VoteReader


class ScoreQuestion(ModelQuestion):
    """The question how good a turn was."""

    prompt: PromptMaker = PluginConfig(path=f"{MODEL}.prompts.ask_score")
    parser: VoteReader = PluginConfig(path=f"{MODEL}.parsing.read_score")


class HintQuestion(ModelQuestion):
    """The question about a hint. A vote of 1 that carries a hint says yes."""

    prompt: PromptMaker = PluginConfig(path=f"{MODEL}.prompts.ask_hint")
    parser: VoteReader = PluginConfig(path=f"{MODEL}.parsing.read_hint")


class HintConfig(Section):
    """Hints say what would have made an answer better, learned from what came next."""

    question: HintQuestion | None = Field(
        default=HintQuestion(),
        description="With null in place of the section, the votes for the winning score carry the hints, "
        "and nothing else is asked.",
    )
    choose: Annotated[LongestHint | OverlapHint, Field(discriminator="type")] = Field(
        default=LongestHint(), description="Choice among the hints of the votes that say yes."
    )
    teacher: Annotated[PolicyTeacher | JudgeTeacher | UrlTeacher, Field(discriminator="type")] | None = Field(
        default=None,
        description="Model that scores the tokens of the answer after the prompt with the hint. Without "
        "the section no tokens are scored, and hints are only stored.",
    )


class JudgeSection(Section):
    """Settings of every judge of live turns."""

    ask_again_s: float = Field(
        default=60,
        gt=0,
        description="Seconds until the judge is asked again about a turn of a live user without a verdict: "
        "the judge has returned none, has failed in all attempts, or cannot be started. They double each "
        "time, up to an hour.",
    )
    give_up_s: float = Field(
        default=21_600,
        gt=0,
        description="Seconds that a turn of a live user may wait for its verdict, counted from what came "
        "next or from the last start of the run. Then the turn is `failed`: it gets no score and is not "
        "trained.",
    )


class CodeJudge(JudgeSection):
    """Code that says how good a turn was."""

    type: Literal["code"] = "code"
    code: Plugin = Field(
        default=PluginConfig(path="slipstream.rollout.reward.live.RuleJudge"),
        description="Import path of a class with the method `judge` of "
        "`slipstream.rollout.reward.live.LiveJudge`, which gives a turn its score from what came next, or of "
        "a function with its parameters.",
    )


class ModelJudge(JudgeSection):
    """A language model that votes on how good a turn or an episode was."""

    type: Literal["model"] = "model"
    endpoint: Endpoint = Field(description="Server or engines of the language model.")
    votes: int = Field(
        default=3,
        ge=1,
        le=64,
        description="Number of times that the model is asked each question. The score with the most votes "
        "counts; if two scores lead, there is no verdict yet.",
    )
    min_votes: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Smallest number of votes that must have come and be readable. With fewer votes there "
        "is no verdict yet.",
    )
    temperature: float = Field(default=0.6, ge=0, description="Temperature at which the model is sampled.")
    max_new_tokens: int = Field(
        default=4096,
        ge=1,
        description="Largest number of tokens of an answer of the model. An answer that is cut off there "
        "counts as unparsable.",
    )
    request_timeout_s: float = Field(
        default=100,
        gt=0,
        description="Seconds that one vote may take; after them the vote is missing. All votes on one turn "
        "are requested at once.",
    )
    score: ScoreQuestion | None = Field(
        default=ScoreQuestion(),
        description="With null in place of the section, no score is asked for, "
        "and turns are trained by their teacher alone.",
    )
    hint: HintConfig | None = Field(default=None, description="Without the section no hints are asked for.")

    @property
    def scores_tokens(self) -> bool:
        """True if a teacher scores the tokens of answers."""
        return self.hint is not None and self.hint.teacher is not None


Judge = Annotated[CodeJudge | ModelJudge, Field(discriminator="type")]


def asks_policy(judge: Judge) -> bool:
    """True if judge processes send requests to the policy's engines."""
    if not isinstance(judge, ModelJudge):
        return False
    hint = judge.hint
    by_hint = hint is not None and (
        (hint.teacher is not None and hint.teacher.type == "policy") or hint.choose.type == "overlap"
    )
    return judge.endpoint.type == "policy" or by_hint


def own_engines(judge: Judge) -> OwnEngines | None:
    """Return the engines of the judge's own; None: it has none."""
    if isinstance(judge, ModelJudge) and isinstance(judge.endpoint, OwnEngines):
        return judge.endpoint
    return None
