"""``gateway``: the endpoint for live users."""

from typing import Literal, Self

from pydantic import Field, model_validator

from slipstream.configs.schema.base import PathSetting, Section
from slipstream.configs.schema.rollout import DialectConfig


class LimitsConfig(Section):
    """Limits of a gateway process for one request, for one API key and for all sessions together."""

    body_bytes: int = Field(
        default=4_194_304, ge=1024, description="Largest body of a request, in bytes; beyond it, HTTP 413."
    )
    messages: int = Field(
        default=2048, ge=1, description="Largest number of messages of a request; beyond it, HTTP 400."
    )
    choices: int = Field(
        default=16,
        ge=1,
        description="Largest number of answers to a request (`n`, times the number of its prompts); beyond "
        "it, HTTP 400.",
    )
    context: int | None = Field(
        default=None,
        ge=16,
        description="Largest number of tokens of prompt and answer together; a longer prompt gets HTTP "
        "400. null: what the engines serve of the model's context, except the last six tokens.",
    )
    concurrent: int = Field(
        default=1024,
        ge=1,
        description="Largest number of answers that a process generates at a time; beyond it, HTTP 503, "
        "or 529 to Anthropic's clients.",
    )
    requests_per_minute: float | None = Field(
        default=None,
        gt=0,
        description="Number of requests that one API key may send in a minute, spread out or at once; "
        "beyond it, HTTP 429. null: no limit.",
    )
    tokens_per_minute: float | None = Field(
        default=None,
        gt=0,
        description="Number of tokens, of prompts and answers, that one API key may use in a minute, spread "
        "out or at once. They count when a request has ended; beyond them, HTTP 429. null: no limit.",
    )
    sessions_per_key: int | None = Field(
        default=None,
        ge=1,
        description="Largest number of sessions that a process keeps for one API key. Beyond it the key's "
        "own sessions are evicted as by `sessions`. null: no limit.",
    )
    sessions: int = Field(
        default=100_000,
        ge=1,
        description="Largest number of sessions that a process keeps. Beyond it the API key with the most "
        "sessions loses the one that has rested longest. A session with a turn that waits to be judged is "
        "lost only to a key with fewer sessions. If no session can be evicted: HTTP 429.",
    )
    session_bytes: int = Field(
        default=4_294_967_296,
        ge=1_048_576,
        description="Memory for the stored histories of all sessions of a process, in bytes. Beyond it, the "
        "API key with the most bytes loses the histories that have rested longest.",
    )


class TurnRule(Section):
    """A rule for requests that do not say whether their turn is trained. All conditions must hold."""

    turn_type: Literal["main", "side"] = Field(
        description="Type of the turn. A turn of the type `side` is not trained, and is nobody's next state."
    )
    key: str = Field(default="*", min_length=1, description="Name of the API key; `*` stands for anything.")
    model: str | None = Field(
        default=None, min_length=1, description="Model that the request names; `*` stands for anything."
    )
    header: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9_-]+(:.*)?$",
        description="Header of the request, as `NAME` or `NAME: VALUE`; `*` stands for anything.",
    )
    text: str | None = Field(
        default=None,
        min_length=4,
        description="Phrase in the first 4,096 characters of the instructions or of the last user message.",
    )

    @model_validator(mode="after")
    def _has_a_condition(self) -> Self:
        if self.key == "*" and self.model is self.header is self.text is None:
            raise ValueError(
                "the rule has no condition and would hold for every request: give it key, model, header or "
                "text"
            )
        return self


class TracesConfig(Section):
    """Spans of requests and events of clients' rewards, by OpenTelemetry's conventions for generative AI
    (docs/gateway.md). No request waits for them."""

    endpoint: str = Field(
        pattern=r"^https?://[^/\s@?#]+(/[^\s?#]*)?$",
        description="Address of a collector that takes OTLP over HTTP in its JSON form, such as "
        "`http://127.0.0.1:4318`. Spans go to its `/v1/traces`, rewards to its `/v1/logs`.",
    )
    headers_env: str | None = Field(
        default=None,
        min_length=1,
        description="Environment variable with headers for the collector, as `NAME=VALUE,NAME=VALUE` with "
        "percent-encoding; null: it needs none.",
    )
    content: bool = Field(
        default=False,
        description="Send the messages of requests and answers as well. Of a history beyond 131,072 "
        "characters only the last messages are sent.",
    )


class GatewayConfig(DialectConfig):
    """The endpoint for live users, on the engines that also generate rollouts. It serves OpenAI's and
    Anthropic's protocols and SGLang's own (docs/live.md)."""

    host: str = Field(
        default="127.0.0.1",
        min_length=1,
        description="Address on which to listen. With the default no other machine can connect.",
    )
    port: int = Field(default=30000, ge=1, le=65535, description="Port of the endpoint.")
    admin_port: int = Field(
        default=30001,
        ge=1,
        le=65535,
        description="Port for metrics and maintenance, on 127.0.0.1 only. It differs from `port`, so that "
        "users do not reach it.",
    )
    processes: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Number of gateway processes. A conversation belongs to one of them; the others forward "
        "its requests.",
    )
    keys: PathSetting | None = Field(
        default=None,
        description="File with the hashed API keys, which `slipstream key` writes; null: `NAME.keys.json` "
        "beside the folder of the run NAME. Without any key every request is refused.",
    )
    served_model_name: str | None = Field(
        default=None,
        min_length=1,
        description="Name of the model in `/v1/models` and in answers to requests that name none; null: the "
        "run's name. Requests may name any model.",
    )
    allow_gaps: bool = Field(
        default=False,
        description="Allow engines that share GPUs with the trainer (`rollout.engine.colocated`): users "
        "get no tokens while the trainer trains.",
    )
    idle_timeout_s: float = Field(
        default=1800,
        gt=0,
        description="Seconds without a request after which a session ends. Its last turn is then judged "
        "without a next state.",
    )
    helpers: Literal["side", "main"] = Field(
        default="side",
        description="Type of turns by which agents help themselves: titles, summaries, suggestions and "
        "others that are known by their shape (docs/agents.md). `main`: they are turns as all others.",
    )
    turns: list[TurnRule] = Field(
        default=[],
        description="Rules for the types of turns whose requests do not say. The first rule that holds "
        "counts, and goes before `helpers`.",
    )
    log_content: bool = Field(
        default=False, description="Write the content of requests and answers into the log."
    )
    traces: TracesConfig | None = Field(
        default=None, description="Where spans of requests and events of rewards are sent; null: nowhere."
    )
    limits: LimitsConfig = Field(
        default=LimitsConfig(),
    )
