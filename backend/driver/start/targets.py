"""What supervised training learns: the response as the chat template writes it behind the prompt.

    chat, with the generation prompt ──► text P ──► tokens of the prompt
    chat with the response           ──► text W = P + target ──► tokens of the target

A reasoning template writes more than the response: an empty think block, a line end, another channel. The
target holds all of that, and begins where the generation prompt ends. Templates that open a think block in
the generation prompt and drop it from finished chats (DeepSeek-R1) do not write W: there the response must
close the block itself.
"""

from collections.abc import Mapping, Sequence

from slipstream.backend.driver.start.rendering import shared_length
from slipstream.rollout.prompts import Check
from slipstream.rollout.prompts.reading import value_at
from slipstream.rollout.tokens.tokenizer import END_OF_REASONING as CLOSE
from slipstream.rollout.tokens.tokenizer import HfTokenizer
from slipstream.rollout.tokens.trajectory import Messages, Prompt

MOST_CHECKED = 2000
"""Number of examples whose targets are compared with the template before all are encoded."""

OPEN = "<think>"


class NoTarget(ValueError):
    """The chat template does not write a response so that it follows on the prompt."""


def token_pair(
    tokenizer: HfTokenizer, asked: Messages, answer: Mapping[str, object]
) -> tuple[list[int], list[int]]:
    """Return the tokens of a chat as a rollout sends it, and of the message to learn with its end token.

    Raises NoTarget, and whatever the template raises.
    """
    prompt, target = text_pair(tokenizer, asked, answer)
    prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
    ids = tokenizer.encode(prompt + target, add_special_tokens=False)
    if ids[: len(prompt_ids)] == prompt_ids:
        target_ids = ids[len(prompt_ids) :]
    else:  # a token of the whole text spans the end of the prompt, which a rollout never sends
        target_ids = tokenizer.encode(target, add_special_tokens=False)
    if target_ids[-1:] != [tokenizer.eos_token_id]:
        target_ids.append(tokenizer.eos_token_id)
    return prompt_ids, target_ids


def text_pair(tokenizer: HfTokenizer, asked: Messages, answer: Mapping[str, object]) -> tuple[str, str]:
    """Return a chat as a rollout sends it, and the message to learn. Raises as ``token_pair`` does."""
    prompt = _rendered(tokenizer, asked, add_generation_prompt=True)
    return prompt, _target(tokenizer, prompt, asked, answer)


def answer_of(text: str, fields: Mapping[str, object] | None = None) -> dict[str, object]:
    """Return the message of the assistant with a text. ``fields``: its other fields."""
    return {**(fields or {}), "role": "assistant", "content": text}


def target_check(tokenizer: HfTokenizer, columns: Sequence[str]) -> Check:
    """Return a check that the template writes the responses in ``columns``; none: the last message."""
    checked = 0

    def check(prompt: Prompt) -> str | None:
        nonlocal checked
        *asked, last = prompt.messages()
        answers = [(f"`{name}`", answer_of(value_at(prompt.metadata, name))) for name in columns]
        if not columns:
            answers = [("the last message", last)]
        checked += 1
        if checked > MOST_CHECKED and not any("think>" in str(answer["content"]) for _, answer in answers):
            return None
        for name, answer in answers:
            try:
                text_pair(tokenizer, prompt.messages() if columns else asked, answer)
            except NoTarget as error:
                return f"{name}: {error}"
            except Exception as error:  # the template is code of the model's
                return f"{name}: the chat template fails with it: {type(error).__name__}: {error}"
        return None

    return check


def _rendered(tokenizer: HfTokenizer, messages: Messages, **settings: object) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, **settings)


def _target(tokenizer: HfTokenizer, prompt: str, asked: Messages, answer: Mapping[str, object]) -> str:
    """Return the text of the target, without what the template writes after the end token."""
    content, end = str(answer["content"]), tokenizer.decode([tokenizer.eos_token_id])
    whole = _rendered(tokenizer, [*asked, dict(answer)])
    if whole.startswith(prompt):
        target = _until_end(whole[len(prompt) :], content, end)
        _refuse_loss(target, answer)
        return target
    shared = shared_length(prompt, whole)
    opened, written = prompt[shared:], whole[shared:]
    if CLOSE in opened and CLOSE not in content:  # the prompt closes an empty block, which no chat has
        target = _until_end(written, content, end)
        _refuse_loss(target, answer)
        return target
    if prompt.rstrip().endswith(OPEN):
        return _closing(prompt, content)
    raise NoTarget(
        f"the chat template writes {written[:80]!r} for it, where the generation "
        f"prompt writes {opened[:80]!r}; expected a template of which one begins with the other "
        "(chat_template.jinja, model.template_args)"
    )


def _until_end(target: str, content: str, end: str) -> str:
    head, found, tail = target.rpartition(end)
    if found and not tail.strip():
        return head + found
    return target if target.endswith(content) else target.rstrip()


def _closing(prompt: str, content: str) -> str:
    """Return a response that goes on inside the think block that the prompt has opened."""
    if CLOSE not in content:
        raise NoTarget(
            f"the generation prompt opens {OPEN}, and the response has no {CLOSE}; expected the reasoning, "
            f"{CLOSE} and the answer, or a template without reasoning (model.template_args)"
        )
    text = content.lstrip()
    text = text[len(OPEN) :] if text.startswith(OPEN) else content
    return text.lstrip("\n") if prompt.endswith("\n") else text


def _refuse_loss(target: str, answer: Mapping[str, object]) -> None:
    reasoning, closed, said = str(answer["content"]).rpartition(CLOSE)
    parts = [said, reasoning.split(OPEN)[-1] if closed else ""]
    parts += [str(value) for name in ("reasoning_content", "thinking") if (value := answer.get(name))]
    for part in parts:
        if part.strip() not in target:
            raise NoTarget(
                f"the chat template writes {target[:80]!r} for it, without {part.strip()[:80]!r}; expected a "
                "template that writes all of a response (chat_template.jinja)"
            )
