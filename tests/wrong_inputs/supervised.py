"""Wrong recipes and examples of ``slipstream sft``."""

from tests.wrong_inputs.case import WrongInput
from tests.wrong_inputs.world import EXAMPLES, lines

SFT = ("check", "FOLDER/sft.yaml", "--sft")
LINE_3 = "data.path: FOLDER/examples.jsonl, line 3: "


def _example(name: str, *says: str, learn: str = "responses", **changes: object) -> WrongInput:
    row = {name: value for name, value in {**EXAMPLES[2], **changes}.items() if value is not ...}
    return WrongInput(
        name,
        (LINE_3, *says),
        overrides=(f"learn={learn}",),
        files={"examples.jsonl": lines([*EXAMPLES[:2], row, *EXAMPLES[3:]])},
        arguments=SFT,
    )


CASES = (
    _example("no response", "no column `response`", "expected a text to learn from", response=...),
    _example("an empty response", '`response` is ""', "not empty", response=""),
    _example("a number for a response", "`response` is 5", "expected a text", response=5),
    _example("no rejected answer", "no column `rejected`", learn="preferences", rejected=...),
    _example("null for a chosen answer", "`chosen` is null", learn="preferences", chosen=None),
    _example("a chat without content", "its `content` is missing", prompt=[{"role": "user"}]),
    _example("an example that is too long", "608 tokens, expected at most 512", response="1" * 600),
    WrongInput(
        "a setting of a run",
        ("rollout", "unknown"),
        overrides=("rollout.batch_size=4",),
        arguments=SFT,
    ),
    WrongInput(
        "a wrong word for what is learned",
        ("learn = 'prefs'", "expected 'responses' or 'preferences'"),
        overrides=("learn=prefs",),
        arguments=SFT,
    ),
    WrongInput(
        "wrong examples, at the start of training",
        (LINE_3, "no column `response`"),
        files={"examples.jsonl": lines([*EXAMPLES[:2], {"prompt": "?"}])},
        arguments=("sft", "FOLDER/sft.yaml"),
    ),
    WrongInput(
        "no chat template for examples",
        ("model.path: the tokenizer has no chat template",),
        files={"model/chat_template.jinja": None},
        arguments=SFT,
    ),
)
