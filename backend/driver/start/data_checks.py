"""Checks of prompt sets against the tokenizer, the chat template and the reward that will meet them.

Every row is read and compared with what its columns must be. The chat template writes one prompt for each
order of roles, and every prompt that may be too long for the model. Nothing is kept: a set may be larger
than the memory.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from jinja2 import TemplateError
from jinja2.exceptions import TemplateSyntaxError

from slipstream.backend.driver.start.length_filter import rendered_ids, shape_of, text_bytes
from slipstream.backend.driver.start.plugin_checks import is_user_code
from slipstream.backend.driver.start.rendering import text_problem
from slipstream.backend.driver.start.targets import target_check
from slipstream.configs.schema import RunConfig
from slipstream.rollout.prompts import Check, text_in
from slipstream.rollout.prompts.chat import content_problem, role_problem
from slipstream.rollout.system import plugins
from slipstream.rollout.tokens.tokenizer import HfTokenizer
from slipstream.rollout.tokens.trajectory import Prompt

WRITES_PROMPTS = ("slipstream.rollout.workflow.SingleTurn", "slipstream.rollout.workflow.ToolUse")
"""Workflows whose first request is the prompt as the chat template writes it."""

MOST_SHAPES = 500
"""Number of different orders of roles with which the chat template is tried."""

MOST_RENDERED = 1000
"""Number of prompts whose texts are looked for in what the template writes, beside one of each shape."""

MOST_TOKENIZED = 8 << 20
"""Bytes of prompts that are tokenized to find their lengths. Beyond them only those that are surely too
long."""

BYTES_PER_TOKEN = 10
"""More bytes than a token has on average in any text."""

TEMPLATE_BYTES = 512
"""Room for what a chat template adds to the texts of a prompt."""


@dataclass(frozen=True)
class Room:
    """The tokens that a prompt may have."""

    tokens: int
    why: str
    """Where the number comes from, for messages."""


def prompt_checks(
    config: RunConfig, tokenizer: HfTokenizer | None, context: int | None, new_tokens: int, setting: str
) -> list[Check]:
    """Return the checks of a prompt set of a run.

    ``context``: tokens that the engines serve, None if unknown. ``setting``: that of ``new_tokens``.
    """
    checks: list[Check] = []
    if writes_prompts(config) and tokenizer is not None and tokenizer.chat_template:
        room = None
        if context is not None:
            why = f"the engines have room for {context}, of which {setting} takes {new_tokens}"
            room = Room(context - new_tokens, why)
        checks.append(TemplateCheck(tokenizer, room))
    if writes_prompts(config) and (label_check := _label_check(config)) is not None:
        checks.append(label_check)
    return checks


def writes_prompts(config: RunConfig) -> bool:
    """True if the chat template writes the prompts of the run: neither code of the user's nor an agent
    does."""
    return config.rollout.hooks is None and config.rollout.workflow.path in WRITES_PROMPTS


def example_checks(
    tokenizer: HfTokenizer | None, context: int | None, columns: tuple[str, ...]
) -> list[Check]:
    """Return the checks of examples for ``slipstream sft``, whose ``columns`` are learned."""
    checks = [text_in(column) for column in columns]
    if tokenizer is not None and tokenizer.chat_template:
        room = None if context is None else Room(context, f"the model has room for {context}")
        checks += [
            TemplateCheck(tokenizer, room, columns, is_answered=not columns),
            target_check(tokenizer, columns),
        ]
    return checks


def template_problems(tokenizer: HfTokenizer, template: str | None = None) -> list[str]:
    """Return what is wrong with a chat template, as far as it does not depend on the prompts.

    ``template``: another one than the tokenizer's own.
    """
    if template is None and not tokenizer.chat_template:
        return [
            "the tokenizer has no chat template, which writes prompts for the model; expected "
            "`chat_template` in "
            "tokenizer_config.json, or a file chat_template.jinja beside it"
        ]
    try:
        settings = {} if template is None else {"chat_template": template}
        tokenizer.apply_chat_template([{"role": "user", "content": "?"}], tokenize=False, **settings)
    except TemplateSyntaxError as error:
        lines = (template or str(tokenizer.chat_template)).splitlines()
        text = lines[error.lineno - 1].strip()[:80] if 0 < error.lineno <= len(lines) else ""
        return [
            f"the chat template has a syntax error in line {error.lineno}, {text!r}: {error.message}; "
            "correct it in "
            "tokenizer_config.json or chat_template.jinja"
        ]
    except Exception:  # it may refuse this chat and take those of the prompt set
        return []
    return []


def template_file_problems(config: RunConfig, tokenizer: HfTokenizer) -> list[str]:
    """Return what is wrong with the chat templates of the recipe's endpoints."""
    dialects = {"gateway": config.gateway, "rollout.endpoint": config.rollout.endpoint}
    problems: list[str] = []
    for section, dialect in dialects.items():
        if dialect is None or dialect.chat_template is None:
            continue
        try:
            template = dialect.chat_template.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = (
                f"{dialect.chat_template} cannot be read: {error}; expected a file with a Jinja chat template"
            )
            problems.append(f"{section}.chat_template: {reason}")
            continue
        found = template_problems(tokenizer, template)
        problems += [f"{section}.chat_template: {dialect.chat_template}: {reason}" for reason in found]
    return problems


class TemplateCheck:
    """Writes prompts as a rollout sends them, and counts their tokens where they may be too many."""

    def __init__(
        self,
        tokenizer: HfTokenizer,
        room: Room | None,
        columns: tuple[str, ...] = (),
        *,
        is_answered: bool = False,
    ) -> None:
        """``columns``: texts that follow on the prompt, the longest of which counts. ``is_answered``: the
        last message is learned."""
        self._is_answered = is_answered
        self._tokenizer = tokenizer
        self._room = room
        self._columns = columns
        self._way_out = (
            "shorten it, or leave the row out"
            if columns
            else f"shorten it, or leave it out: max_prompt_tokens: {max(1, room.tokens if room else 1)}"
        )
        self._shapes: set[tuple[object, ...]] = set()
        self._tokenized = 0
        self._rendered = 0
        template = str(tokenizer.chat_template)
        self._works = not template_problems(tokenizer)
        self._names_role: Callable[[str], bool] = lambda role: (
            f"'{role}'" in template or f'"{role}"' in template
        )

    def __call__(self, prompt: Prompt) -> str | None:
        """Return what is wrong with a prompt."""
        if isinstance(prompt.prompt, list):
            if reason := content_problem(prompt.prompt, is_answered=self._is_answered):
                return reason
            given = [str(message["role"]) for message in prompt.prompt]
            if reason := role_problem(prompt.prompt, [role for role in given if self._names_role(role)]):
                return reason
        if not self._works:
            return None  # it is said once, and not of each prompt
        shape = shape_of(prompt)
        is_new = shape not in self._shapes and len(self._shapes) < MOST_SHAPES
        self._rendered += 1
        if is_new or self._rendered <= MOST_RENDERED:
            self._shapes.add(shape)
            if reason := self._template_problem(prompt, is_new):
                return reason
        return self._length_problem(prompt)

    def _template_problem(self, prompt: Prompt, is_new: bool) -> str | None:
        try:
            is_empty = is_new and not rendered_ids(self._tokenizer, prompt)
            problem = text_problem(self._tokenizer, prompt.messages())
        except TemplateError as error:
            roles = ", ".join(str(message["role"]) for message in prompt.messages())
            return (
                f"`prompt`: the chat template refuses a chat with the roles {roles}: {error.message}; "
                "change the "
                "chat, or the template (tokenizer_config.json or chat_template.jinja)"
            )
        except Exception as error:  # the template is code of the model's
            roles = ", ".join(str(message["role"]) for message in prompt.messages())
            return (
                f"`prompt`: the chat template fails with the roles {roles}: {type(error).__name__}: {error}"
            )
        return "`prompt`: the chat template makes no token of it" if is_empty else problem

    def _length_problem(self, prompt: Prompt) -> str | None:
        if self._room is None:
            return None
        targets = [str(prompt.metadata.get(column, "")) for column in self._columns]
        size = text_bytes(prompt.prompt) + max((text_bytes(target) for target in targets), default=0)
        if size + TEMPLATE_BYTES <= self._room.tokens:
            return None  # no token has less than a byte
        self._tokenized += size
        if self._tokenized > MOST_TOKENIZED and size < BYTES_PER_TOKEN * self._room.tokens:
            return None
        try:
            tokens = len(rendered_ids(self._tokenizer, prompt))
        except Exception:  # said of the first prompt of its shape
            return None
        tokens += max(
            (len(self._tokenizer.encode(text, add_special_tokens=False)) + 1 for text in targets), default=0
        )
        if tokens <= self._room.tokens:
            return None
        what = (
            f"`prompt` and {' or '.join(f'`{name}`' for name in self._columns)} have"
            if targets
            else "`prompt` has"
        )
        return (
            f"{what} {tokens} tokens, expected at most {self._room.tokens}: {self._room.why} "
            f"(max_position_embeddings); {self._way_out}"
        )


def _label_check(config: RunConfig) -> Check | None:
    """Return a check by the reward, if it comes with Slipstream and says which prompts it can judge."""
    reward = config.rollout.reward
    if reward is None or is_user_code(reward):
        return None
    try:
        judge: object = plugins.build(reward)
    except Exception:  # said elsewhere
        return None
    check_prompt = cast("Callable[[Prompt], None] | None", getattr(judge, "check_prompt", None))
    if check_prompt is None:
        return None

    def check(prompt: Prompt) -> str | None:
        try:
            check_prompt(prompt)
        except ValueError as error:
            return (
                f"`label`: {str(error).replace(prompt.reference, 'it', 1)} ({reward.path} compares with it)"
            )
        return None

    return check
