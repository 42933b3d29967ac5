"""Compares the tokenizer of a model folder with tokenizer.json and with the engines' own loader.

    the same texts ──► tokenizer.json (library tokenizers) ──► ids, and their text
                  ├──► load_tokenizer                      ──► the same, or a problem
                  └──► SGLang's get_tokenizer              ──► the same text, or a problem

SGLang is asked in a process of its own, because its import takes seconds, and only where its answer may
differ: if a part of tokenizer.json had to be restored, or the recipe sets how SGLang reads tokenizers.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from slipstream.rollout.engine.server_process import let_import_sglang
from slipstream.rollout.system.imports import ask
from slipstream.rollout.tokens.tokenizer import HfTokenizer, raw_tokenizer

TEXTS = (
    "Weather in  Paris?",
    "  It's 12345.678, isn't it?\n",
    "def f(x):\n\tif x:\n        return 'a  b'\r\n\n\n  # end",
    "\u4e2d\u6587\u5206\u8bcd \U0001f600 na\u00efve",
)
"""Blanks, line ends, tabs, digits, quotes, Chinese, an emoji: what tokenizers take apart differently."""

MOST_SPECIAL = 64
"""Number of special tokens that are compared."""

SETTINGS = ("tokenizer_mode", "tokenizer_backend", "trust_remote_code")
"""Arguments of engines that decide how SGLang reads a tokenizer."""

ANSWER_TIMEOUT_S = 120.0
"""Seconds for the import of SGLang and its answer."""


def tokenizer_findings(
    folder: Path, tokenizer: HfTokenizer, engine_args: Mapping[str, object] | None
) -> tuple[list[str], list[str]]:
    """Return what is wrong with a tokenizer, and notes. ``engine_args``: None where there are no engines."""
    if not (folder / "tokenizer.json").exists():
        return [], []
    raw = raw_tokenizer(folder)
    texts = [*TEXTS, *_special_tokens(raw, str(tokenizer.chat_template))]
    ids = [raw.encode(text, add_special_tokens=False).ids for text in texts]
    said = [raw.decode(each, skip_special_tokens=False) for each in ids]
    for text, expected, decoded in zip(texts, ids, said, strict=True):
        found = tokenizer.encode(text, add_special_tokens=False)
        if found != expected:
            return [_differs(folder, text, "gives the ids", expected, found)], []
        if (found := tokenizer.decode(expected)) != decoded:
            return [_differs(folder, text, "decodes its ids to", decoded, found)], []
    notes = _of_blanks(folder, said[0])
    settings = {name: value for name, value in (engine_args or {}).items() if name in SETTINGS}
    if engine_args is None or not (tokenizer.restored or settings):
        return [], notes
    problems, more = _of_engine(folder, settings, texts, ids, said)
    return problems, notes + more


def _special_tokens(raw: Any, template: str) -> list[str]:
    """Return the special tokens of tokenizer.json, those of the chat template first."""
    tokens = [each.content for each in raw.get_added_tokens_decoder().values()]
    return sorted(tokens, key=lambda token: token not in template)[:MOST_SPECIAL]


def _of_blanks(folder: Path, said: str) -> list[str]:
    if not said.casefold().startswith("weatherin"):
        return []
    return [
        f"model.path: {folder}/tokenizer.json loses blanks itself: {TEXTS[0]!r} becomes {said!r}; expected "
        "the file that the model was published with"
    ]


def _of_engine(
    folder: Path,
    settings: Mapping[str, object],
    texts: Sequence[str],
    ids: Sequence[Sequence[int]],
    said: Sequence[str],
) -> tuple[list[str], list[str]]:
    request = json.dumps([str(folder), settings, texts, ids]).encode()
    answers, ending = ask(f"{__name__}.engine_answer", request, 1, ANSWER_TIMEOUT_S)
    if not answers:
        why = "" if ending is None else f": {ending.value}"
        return [], [f"model.path: SGLang could not be asked how it reads the tokenizer in {folder}{why}"]
    if isinstance(answers[0], str):
        return [f"model.path: SGLang cannot read the tokenizer in {folder}: {answers[0]}"], []
    encoded, decoded = cast("tuple[list[list[int]], list[str]]", answers[0])
    for text, expected, found in zip(texts, said, decoded, strict=True):
        if found != expected:
            return [_differs(folder, text, "decodes its ids to", expected, found, "SGLang")], []
    for text, expected, found in zip(texts, ids, encoded, strict=True):
        if found != expected:
            difference = _differs(folder, text, "gives the ids", expected, found, "SGLang")
            return [], [f"{difference}; training does not see this: Slipstream sends engines token ids"]
    return [], []


def engine_answer(request: bytes) -> Iterator[object]:
    """Yield the ids and the decoded texts of SGLang's tokenizer, or why it cannot be loaded."""
    folder, settings, texts, ids = json.loads(request)
    let_import_sglang()
    from slipstream.rollout.engine.launch import read_tokenizer

    try:
        tokenizer = read_tokenizer(Path(folder), settings)
        encoded = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        yield encoded, [tokenizer.decode(each) for each in ids]
    except Exception as error:  # whatever the files make transformers raise
        yield f"{type(error).__name__}: {error}"


def _differs(
    folder: Path, text: str, does: str, expected: object, found: object, who: str = "the tokenizer"
) -> str:
    return (
        f"model.path: {folder}: {who} reads {text!r} otherwise than tokenizer.json, which {does} {expected}; "
        f"found {found}. The class that tokenizer_config.json names does not fit tokenizer.json: write "
        '"tokenizer_class": "PreTrainedTokenizerFast", which takes the file as it is'
    )
