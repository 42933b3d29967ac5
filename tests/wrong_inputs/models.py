"""Wrong models: config.json, weights, tokenizer and chat template."""

import json
from collections.abc import Callable

from slipstream.backend.quickstart.tokenizer import CHAT_TEMPLATE
from tests.wrong_inputs.case import WrongInput
from tests.wrong_inputs.world import ROWS, lines

CONFIG = {"model_type": "qwen3", "hidden_size": 128, "vocab_size": 48, "max_position_embeddings": 512}
RAISES = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system messages') }}{% endif %}"
SYSTEM = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+1=?"}]
NO_TENSORS = b"\x02\x00\x00\x00\x00\x00\x00\x00{}"
"""A sound file of safetensors."""


def _with(**settings: object) -> Callable[[str], str]:
    return lambda text: json.dumps(json.loads(text) | settings)


CASES = (
    WrongInput(
        "a model of another family",
        ("model.path", "model_type 'bert' is not mapped", "supported: ", "qwen3"),
        files={"model/config.json": '{"model_type": "bert"}'},
    ),
    WrongInput(
        "a model that nobody has looked at",
        ("model.path", "model_type 'unheard_of' is not mapped", "was not examined", "model.families"),
        files={"model/config.json": lambda text: text.replace('"qwen3"', '"unheard_of"')},
    ),
    WrongInput(
        "two rotary settings",
        ("model.path", "rope_parameters={", "rope_scaling={'rope_type': 'yarn'", "keep one of them"),
        files={"model/config.json": _with(rope_scaling={"rope_type": "yarn", "factor": 4.0})},
    ),
    WrongInput(
        "a share of rotated dimensions that the model ignores",
        ("model.path", "partial_rotary_factor is 0.5", "rotate whole heads", "remove it"),
        files={"model/config.json": _with(partial_rotary_factor=0.5)},
    ),
    WrongInput(
        "a head that is nowhere",
        ("model.path", "missing: lm_head.weight", "tie_word_embeddings: true"),
        files={"model/config.json": _with(tie_word_embeddings=False)},
    ),
    WrongInput(
        "a single file beside an index of others",
        ("model.path", "model.safetensors is beside model.safetensors.index.json", "remove the one"),
        files={
            "model/part.safetensors": NO_TENSORS,
            "model/model.safetensors.index.json": json.dumps({"weight_map": {"a": "part.safetensors"}}),
        },
    ),
    WrongInput(
        "a config.json that is no JSON",
        ("model.path = 'FOLDER/model'", "config.json is not a readable JSON object"),
        files={"model/config.json": "{"},
    ),
    WrongInput(
        "a config.json that lacks numbers",
        ("model.path", "config.json has no number for", "num_attention_heads"),
        files={"model/config.json": json.dumps(CONFIG)},
    ),
    WrongInput(
        "a model that engines cannot serve on CPUs",
        ("model.path: SGLang cannot serve qwen3_next on CPUs", "linear attention", "run it on GPUs"),
        files={"model/config.json": lambda text: text.replace('"qwen3"', '"qwen3_next"')},
    ),
    WrongInput(
        "no weights",
        ("model.path", "FOLDER/model holds neither model.safetensors nor model.safetensors.index.json"),
        files={"model/model.safetensors": None},
    ),
    WrongInput(
        "a missing shard",
        ("model.path", "model-00002-of-00002.safetensors", "its index names"),
        files={
            "model/model.safetensors": None,
            "model/model.safetensors.index.json": json.dumps(
                {"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
            ),
        },
    ),
    WrongInput(
        "weights that were cut off",
        ("model.path", "FOLDER/model/model.safetensors cannot be read", "bytes"),
        files={"model/model.safetensors": b"\x08\x00\x00\x00\x00\x00\x00\x00{}"},
    ),
    WrongInput(
        "no tokenizer",
        ("model.path", "FOLDER/model has no tokenizer", "expected one of tokenizer.json"),
        files={"model/tokenizer.json": None, "model/tokenizer_config.json": None},
    ),
    WrongInput(
        "a tokenizer that is no JSON",
        ("model.path", "the tokenizer in FOLDER/model cannot be read", "tokenizer.json"),
        files={"model/tokenizer.json": "{"},
    ),
    WrongInput(
        "a tokenizer of a larger vocabulary",
        ("model.path", "the tokenizer in FOLDER/model has 48 tokens, the model 40", "vocab_size"),
        files={"model/config.json": lambda text: text.replace('"vocab_size": 48', '"vocab_size": 40')},
    ),
    WrongInput(
        "no chat template",
        ("model.path: the tokenizer has no chat template", "chat_template.jinja"),
        files={"model/chat_template.jinja": None},
    ),
    WrongInput(
        "a chat template with a syntax error",
        ("model.path: the chat template has a syntax error in line 2", "{% endfro %}", "endfro"),
        files={"model/chat_template.jinja": "{% for message in messages %}\n{% endfro %}"},
    ),
    WrongInput(
        "a chat template that refuses the data's roles",
        ("data.path: FOLDER/data.jsonl, line 10", "no system messages", "system, user", "the template"),
        files={
            "model/chat_template.jinja": RAISES + CHAT_TEMPLATE,
            "data.jsonl": lines([*ROWS, {"prompt": SYSTEM, "label": "2"}]),
        },
    ),
    WrongInput(
        "a chat template that writes no tools",
        ("rollout.workflow: ToolUse cannot be used with the chat template of FOLDER/model", "leaves out"),
        overrides=(
            "rollout.workflow={path: slipstream.rollout.workflow.ToolUse, args: {tools: [my_tools.add], "
            "parser: qwen25}}",
        ),
        files={"my_tools.py": "async def add(a: int) -> int:\n    return a\n"},
    ),
    WrongInput(
        "an endpoint's chat template that is not there",
        ("gateway.chat_template", "FOLDER/no.jinja", "expected a file with a Jinja chat template"),
        overrides=("gateway={chat_template: FOLDER/no.jinja}",),
    ),
    WrongInput(
        "an endpoint's chat template with a syntax error",
        ("gateway.chat_template: FOLDER/my.jinja", "syntax error in line 1"),
        overrides=("gateway={chat_template: FOLDER/my.jinja}",),
        files={"my.jinja": "{% for %}"},
    ),
    WrongInput(
        "no chat template, at the start of a run",
        ("model.path: the tokenizer has no chat template",),
        arguments=("train", "FOLDER/recipe.yaml"),
        files={"model/chat_template.jinja": None},
    ),
)
