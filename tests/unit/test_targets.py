"""Targets of supervised training are what the chat template writes behind the prompt, token by token."""

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken

from slipstream.backend.driver.start.data_checks import example_checks
from slipstream.backend.driver.start.targets import NoTarget, answer_of, token_pair
from slipstream.rollout.tokens.tokenizer import load_tokenizer
from slipstream.rollout.tokens.trajectory import Prompt
from tests.unit.test_tokenizers import byte_level, folder_of

USER = [{"role": "user", "content": "What is 2+2?"}]

SPLIT = (
    "{%- if m.reasoning_content %}{%- set r = m.reasoning_content %}{%- endif %}"
    "{%- if '</think>' in c %}{%- set r = c.split('</think>')[0].split('<think>')[-1].strip() %}"
    "{%- set c = c.split('</think>')[-1].strip() %}{%- endif %}"
)


def template(answer: str, opening: str, turn: str = "<|im_start|>") -> str:
    return (
        "{%- for m in messages %}{%- set c = m.content %}{%- set r = '' %}{%- if m.role == 'assistant' %}"
        + answer
        + "{%- else %}{{- '<|im_start|>user\\n' + c + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
        + "{%- if add_generation_prompt %}{{- '"
        + opening
        + "' }}{%- endif %}"
    )


HEAD = "<|im_start|>assistant\\n"
PLAIN = template("{{- '" + HEAD + "' + c + '<|im_end|>\\n' }}", HEAD)
TRIMMED = template("{{- '" + HEAD + "' + c | trim + '<|im_end|>\\n' }}", HEAD)
BLOCK = SPLIT + "{{- '" + HEAD + "<think>\\n' + r + '\\n</think>\\n\\n' + c + '<|im_end|>\\n' }}"
QWEN3 = template(BLOCK, HEAD)
QWEN35 = template(BLOCK, HEAD + "<think>\\n")
NO_THINKING = template(BLOCK, HEAD + "<think>\\n\\n</think>\\n\\n")
GLM = template(SPLIT + "{{- '<|im_start|>\\n<think>' + r + '</think>\\n' + c }}", "<|im_start|>")
GPT_OSS = template(
    "{{- '<|im_start|>assistant<|channel|>final<|message|>' + c + '<|im_end|>' }}", "<|im_start|>assistant"
)
R1 = template(SPLIT + "{{- '" + HEAD + "' + c + '<|im_end|>' }}", HEAD + "<think>\\n")
NO_END = template("{{- '" + HEAD + "' + c + '\\n' }}", HEAD)
DROPPING = template(SPLIT + "{{- '" + HEAD + "' + c + '<|im_end|>\\n' }}", HEAD)
CLOSED = template(SPLIT + "{{- '" + HEAD + "' + c + '<|im_end|>\\n' }}", HEAD + "<think>\\n\\n</think>\\n\\n")
OTHER_HEAD = template("{{- '<|im_start|>model\\n' + c + '<|im_end|>\\n' }}", HEAD)

THOUGHT = "<think>\nhm\n</think>\n\n4"


@pytest.fixture
def tokenizer_of(tmp_path: Path):
    def make(chat_template: str):
        raw = byte_level()
        special = ["<|im_start|>", "<|im_end|>", "<|channel|>", "<|message|>"]
        raw.add_special_tokens(special)
        raw.add_tokens([AddedToken(word, normalized=False) for word in ("<think>", "</think>")])
        folder_of(tmp_path, raw, "PreTrainedTokenizerFast", "qwen3")
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "chat_template": chat_template,
        }
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        return load_tokenizer(tmp_path)

    return make


LEARNED = {
    "a plain template": (PLAIN, "4", "4"),
    "blanks that the template keeps": (PLAIN, " 4\n", " 4\n"),
    "blanks that the template trims": (TRIMMED, " 4\n", "4"),
    "reasoning in a plain template": (PLAIN, THOUGHT, THOUGHT),
    "an empty think block": (QWEN3, "4", "<think>\n\n</think>\n\n4"),
    "a think block": (QWEN3, THOUGHT, THOUGHT),
    "a block that the prompt opens": (QWEN35, THOUGHT, "hm\n</think>\n\n4"),
    "a block that the prompt opens, and the response does not": (
        QWEN35,
        "hm\n</think>\n\n4",
        "hm\n</think>\n\n4",
    ),
    "an empty block that the prompt opens": (QWEN35, "4", "\n</think>\n\n4"),
    "an empty block in the prompt": (NO_THINKING, "4", "4"),
    "an empty block in the prompt alone": (CLOSED, "4", "4"),
    "a line end before the block": (GLM, "4", "\n<think></think>\n4"),
    "a channel": (GPT_OSS, "4", "<|channel|>final<|message|>4"),
    "a block that finished chats do not have": (R1, THOUGHT, "hm\n</think>\n\n4"),
    "no end token in the template": (NO_END, "4", "4"),
}


@pytest.mark.parametrize("what", LEARNED)
def test_a_target_is_what_the_template_writes(what: str, tokenizer_of):
    chat_template, response, expected = LEARNED[what]
    tokenizer = tokenizer_of(chat_template)
    prompt, target = token_pair(tokenizer, USER, answer_of(response))
    sent = tokenizer.apply_chat_template(USER, add_generation_prompt=True, return_dict=False)
    assert prompt == sent
    assert tokenizer.decode(target) == expected + "<|im_end|>"
    assert target[-1] == tokenizer.eos_token_id
    whole = tokenizer.apply_chat_template([*USER, answer_of(response)], return_dict=False)
    whole_text = tokenizer.decode(whole)
    if whole_text.startswith(tokenizer.decode(prompt)) and tokenizer.eos_token_id in whole[len(prompt) :]:
        assert whole_text.startswith(tokenizer.decode(prompt + target))
        if whole[: len(prompt)] == prompt:
            assert prompt + target == whole[: len(prompt + target)]


def test_reasoning_in_a_field_of_the_message_is_learned(tokenizer_of):
    tokenizer = tokenizer_of(QWEN3)
    _, target = token_pair(tokenizer, USER, answer_of("4", {"reasoning_content": "hm"}))
    assert tokenizer.decode(target) == THOUGHT + "<|im_end|>"
    with pytest.raises(NoTarget, match="without 'hm'"):
        token_pair(tokenizer_of(PLAIN), USER, answer_of("4", {"reasoning_content": "hm"}))


REFUSED = {
    "an open block that the response does not close": (R1, "4", "has no </think>"),
    "reasoning that the template drops": (DROPPING, THOUGHT, "without 'hm'"),
    "reasoning behind a closed block": (CLOSED, THOUGHT, "where the generation prompt writes"),
    "another head": (OTHER_HEAD, "4", "where the generation prompt writes"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_response_that_cannot_follow_on_the_prompt_is_refused(what: str, tokenizer_of):
    chat_template, response, reason = REFUSED[what]
    tokenizer = tokenizer_of(chat_template)
    with pytest.raises(NoTarget, match=reason):
        token_pair(tokenizer, USER, answer_of(response))
    prompt = Prompt(0, USER, None, {"response": response}, "a.jsonl", 1)
    reasons = [check(prompt) for check in example_checks(tokenizer, 1000, ("response",))]
    assert any(found and found.startswith("`response`: ") and reason in found for found in reasons)
    chat = Prompt(0, [*USER, answer_of(response)], None, {}, "a.jsonl", 1)
    reasons = [check(chat) for check in example_checks(tokenizer, 1000, ())]
    assert any(found and reason in found for found in reasons)
