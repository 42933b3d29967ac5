"""All that agents do to the conversation that they send again, in an order in which it can be composed."""

import re
import unicodedata
from collections.abc import Callable

from tests.unit.rewritten_histories import (
    REMINDER,
    Message,
    Messages,
    Rewriting,
    all_calls_as_texts,
    arguments_as_text,
    arguments_in_another_order,
    calls_as_texts,
    compacted,
    compressed,
    cut_at,
    first_pair_and_half,
    first_question_pinned,
    first_words,
    observations_elided,
    old_calls_dropped,
    old_results_cleared,
    other_ids,
    own,
    reasoning_in_the_text,
    results_in_another_order,
    results_truncated,
    sliding,
    spoilt,
    summary_alone,
    summary_by_the_assistant,
    summary_of_older_steps,
    system,
    text_beside_calls_dropped,
    users_and_a_summary,
    window_from_a_question,
    with_text,
    without_ids,
    without_reasoning,
)
from tests.unit.talking import assistant, user

# ---- answers


def of_answers(history: Messages, change: Callable[[str], str]) -> Messages:
    return [with_text(m, change) if m["role"] == "assistant" and m["content"] else m for m in history]


def answers_stripped(history: Messages, step: int) -> Messages:
    return of_answers(history, str.strip)


def answers_with_crlf(history: Messages, step: int) -> Messages:
    return of_answers(history, lambda text: text.replace("\n", "\r\n"))


def answers_composed(history: Messages, step: int) -> Messages:
    """Letters with accents are one sign each (Unicode's NFC)."""
    return of_answers(history, lambda text: unicodedata.normalize("NFC", text))


def ends_of_lines_stripped(history: Messages, step: int) -> Messages:
    def change(text: str) -> str:
        return re.sub(r"\n{3,}", "\n\n", "\n".join(map(str.rstrip, text.split("\n"))))

    return of_answers(history, change)


def fences_dropped(history: Messages, step: int) -> Messages:
    return of_answers(history, lambda text: re.sub(r"```\w*\n?", "", text))


def old_answers_cut(history: Messages, step: int) -> Messages:
    last = max((i for i, m in enumerate(history) if m["role"] == "assistant"), default=0)
    return [
        spoilt(m, lambda text: text[:4] + "...") if m["role"] == "assistant" and place < last else m
        for place, m in enumerate(history)
    ]


def all_answers_cut(history: Messages, step: int) -> Messages:
    return [
        spoilt(m, lambda text: text[:4] + "...") if m["role"] == "assistant" and m["content"] else m
        for m in history
    ]


def speakers_named(history: Messages, step: int) -> Messages:
    """As AutoGen does: each message begins with the name of who says it."""
    names = {"user": "user_proxy", "assistant": "coder"}
    return [
        with_text(m, lambda text, m=m: f"{names[m['role']]}: {text}") | {"touched": True}
        if m["role"] in names
        else m
        for m in history
    ]


# ---- messages of the agent's own, and what it adds to others


def answered_by_itself(history: Messages, step: int) -> Messages:
    """As aider does, which says where the files are before each question and answers that itself."""
    return [*history[:-1], own("no files"), assistant("Ok."), history[-1]]


def map_of_the_repository(history: Messages, step: int) -> Messages:
    """As aider does at the beginning."""
    place = first_words(history)
    said = [own(f"Here are summaries of some files, {step}"), assistant("Ok, I won't edit those files.")]
    return [*history[:place], *said, *history[place:]]


def goal_moves_to_the_end(history: Messages, step: int) -> Messages:
    """A message of the agent's own stands before the last one, wherever that is."""
    return [*history[:-1], user("Goal: find it."), history[-1]] if history[-1]["role"] == "user" else history


def merged_users(history: Messages, step: int) -> Messages:
    """Put a note before each question, and send both as one message later."""
    start = cut_at(history, 1)

    def noted(message: Message) -> Message:
        return with_text(message, lambda text: f"note\n\n{text}") | {"touched": True}

    notes = [noted(m) if m["role"] == "user" else m for m in history[:start]]
    last = history[start:]
    if last[-1]["role"] == "user":
        return [*notes, user("note"), *last]
    return [*notes, noted(last[0]) if last[0]["role"] == "user" else last[0], *last[1:]]


def reminded_first(history: Messages, step: int) -> Messages:
    place = first_words(history)
    first = history[place]
    if first["role"] != "user":
        return history
    return [
        *history[:place],
        with_text(first, lambda text: f"{REMINDER * bool(step)}{text}"),
        *history[place + 1 :],
    ]


def moving_reminder(history: Messages, step: int) -> Messages:
    return [*history[:-1], with_text(history[-1], lambda text: f"{text}\n{REMINDER}")]


def environment_details(history: Messages, step: int) -> Messages:
    """As cline does, which replaces those of earlier messages by a note."""
    return [
        with_text(
            m,
            lambda text, m=m: (
                f"{text}\n<environment_details>{step if m.get('new') else 'left out'}</environment_details>"
            ),
        )
        if m["role"] == "user"
        else m
        for m in history
    ]


def counting(history: Messages, step: int) -> Messages:
    place = first_words(history)
    first = history[place]
    if first["role"] != "user":
        return history
    return [
        *history[:place],
        with_text(first, lambda text: f"{text} (step {step})") | {"spoilt": not first.get("new")},
        *history[place + 1 :],
    ]


def reminder_as_a_message(history: Messages, step: int) -> Messages:
    return [*history, user(REMINDER)]


def reminder_before_all(history: Messages, step: int) -> Messages:
    return [user(f"{REMINDER} {step}"), *history]


def reminders_between(history: Messages, step: int) -> Messages:
    """They stand after each result."""
    return [part for m in history for part in ((m, user(REMINDER)) if m["role"] == "tool" else (m,))]


def users_joined(history: Messages, step: int) -> Messages:
    """Messages of a user that follow each other are one."""
    joined: Messages = []
    for message in history:
        before = joined[-1] if joined else {"role": ""}
        if message["role"] == before["role"] == "user" and bool(message.get("new")) == bool(
            before.get("new")
        ):
            both = f"{before['content']}\n\n{message['content']}"
            of = [*before.get("of", ()), *message.get("of", ())]
            joined[-1] = {**before, **message, "content": both} | ({"of": of} if of else {})
        else:
            joined.append(message)
    return joined


# ---- instructions


def plain(history: Messages, step: int) -> Messages:
    return [system("be brief"), *history]


def changing_system(history: Messages, step: int) -> Messages:
    return [system(f"it is {step} o'clock"), *history]


def date_in_the_system(history: Messages, step: int) -> Messages:
    return [system(f"Today is 2026-11-{step + 1:02}, 12:{step:02}."), *history]


def instructions_of_the_user(history: Messages, step: int) -> Messages:
    """As agents do whose model knows no system message."""
    place = first_words(history)
    if history[place]["role"] != "user":
        return history
    text = "\n".join(message["content"] for message in history[:place])
    first = with_text(history[place], lambda said: f"{text}\n\n{said}") | {"touched": True}
    return [first, *history[place + 1 :]]


# ---- blanks and parts


def trimmed(history: Messages, step: int) -> Messages:
    return [
        *(with_text(message, str.strip) for message in history[:-1]),
        with_text(history[-1], lambda text: f"  {text}\n"),
    ]


def other_whitespace(history: Messages, step: int) -> Messages:
    def change(text: str) -> str:
        return re.sub(r"\s+", " \r\n", text) if step % 2 else f"\n{text}  "

    return [with_text(m, change) if m["role"] in ("user", "tool") else m for m in history[:-1]] + [
        history[-1]
    ]


def images_replaced(history: Messages, step: int) -> Messages:
    """A question has a picture when it is asked, and later a note in its place."""
    last = cut_at(history, 1)

    def content(place: int, text: str) -> list[Message]:
        picture = "[image 1]" if place == last else "[image omitted]"
        return [{"type": "text", "text": text}, {"type": "text", "text": picture}]

    return [
        m | {"content": content(i, m["content"])} if m["role"] == "user" and m["content"] != REMINDER else m
        for i, m in enumerate(history)
    ]


def reminder_parts(history: Messages, step: int) -> Messages:
    """As Claude Code does: a reminder is a part of the newest message, and of none before."""
    last = history[-1]
    if not isinstance(last["content"], str):
        return history
    return [
        *history[:-1],
        last | {"content": [{"type": "text", "text": t} for t in (last["content"], REMINDER)]},
    ]


def parts(history: Messages, step: int) -> Messages:
    return [
        m | {"content": [{"type": "text", "text": m["content"]}]} if isinstance(m["content"], str) else m
        for m in history[:-1]
    ] + history[-1:]


def lines_as_parts(history: Messages, step: int) -> Messages:
    """Each paragraph is a part of its own, in all messages but the newest."""

    def split(text: str) -> list[Message]:
        return [{"type": "text", "text": part} for part in re.split(r"(?<=\n)", text) if part]

    return [
        m | {"content": split(m["content"])} if isinstance(m["content"], str) and m["content"] else m
        for m in history[:-1]
    ] + history[-1:]


REWRITINGS: list[Rewriting] = [
    sliding,
    compacted,
    summary_by_the_assistant,
    summary_alone,
    users_and_a_summary,
    summary_of_older_steps,
    compressed,
    first_pair_and_half,
    first_question_pinned,
    window_from_a_question,
    old_calls_dropped,
    calls_as_texts,
    all_calls_as_texts,
    results_in_another_order,
    old_results_cleared,
    results_truncated,
    observations_elided,
    arguments_in_another_order,
    arguments_as_text,
    other_ids,
    without_ids,
    text_beside_calls_dropped,
    without_reasoning,
    reasoning_in_the_text,
    answers_stripped,
    answers_with_crlf,
    answers_composed,
    ends_of_lines_stripped,
    fences_dropped,
    old_answers_cut,
    all_answers_cut,
    speakers_named,
    answered_by_itself,
    map_of_the_repository,
    goal_moves_to_the_end,
    merged_users,
    reminded_first,
    moving_reminder,
    environment_details,
    counting,
    reminder_as_a_message,
    reminder_before_all,
    reminders_between,
    users_joined,
    changing_system,
    date_in_the_system,
    instructions_of_the_user,
    trimmed,
    other_whitespace,
    images_replaced,
    reminder_parts,
    parts,
    lines_as_parts,
]
"""In an order in which they can be composed."""
