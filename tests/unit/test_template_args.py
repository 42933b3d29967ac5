"""``model.template_args``: variables of the chat template, wherever it writes prompts of the policy."""

import pytest
from pydantic import ValidationError

from slipstream.backend.quickstart.tokenizer import build_tokenizer
from slipstream.configs.schema import ModelConfig
from slipstream.rollout.tokens.tokenizer import load_tokenizer

CHAT = [{"role": "user", "content": "1+1"}]


def test_the_template_has_the_variables_unless_a_caller_gives_other_values(tmp_path):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}{{ '-' * (thinking or 0) }}"
    tokenizer.save_pretrained(tmp_path)
    bound = load_tokenizer(tmp_path, {"thinking": 2})
    assert bound.apply_chat_template(CHAT, tokenize=False) == "1+1--"
    assert bound.apply_chat_template(CHAT, tokenize=False, thinking=1) == "1+1-"
    assert load_tokenizer(tmp_path).apply_chat_template(CHAT, tokenize=False) == "1+1"


def test_what_slipstream_passes_itself_is_refused():
    with pytest.raises(ValidationError, match="Slipstream sets tokenize"):
        ModelConfig.model_validate({"path": "model", "template_args": {"tokenize": True}})
