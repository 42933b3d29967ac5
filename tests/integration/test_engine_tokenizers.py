"""The tokenizers of Slipstream beside those of the installed SGLang, which is asked in its own process."""

from pathlib import Path

import pytest

from slipstream.backend.commands.check_tokenizer import tokenizer_findings
from slipstream.rollout.tokens.tokenizer import load_tokenizer
from tests.selection import shortened
from tests.unit.test_tokenizers import byte_level, folder_of, sentence_pieces

ASKED = {"tokenizer_mode": "auto"}
"""SGLang's default, for which it is asked even if no part of tokenizer.json was restored."""


@pytest.mark.parametrize(
    "name", shortened(["LlamaTokenizerFast", "Qwen2TokenizerFast"], ["LlamaTokenizerFast"])
)
def test_sglang_reads_byte_level_tokenizers_alike(name: str, tmp_path: Path):
    folder = folder_of(tmp_path, byte_level(), name, "llama")
    tokenizer = load_tokenizer(folder)
    problems, notes = tokenizer_findings(folder, tokenizer, ASKED)
    assert not problems
    differs = name == "Qwen2TokenizerFast"  # SGLang restores no expression that takes words apart
    assert bool(notes) == differs, notes
    assert all("SGLang reads" in note and "Slipstream sends engines token ids" in note for note in notes)


def test_sglang_decodes_sentence_pieces_alike(tmp_path: Path):
    folder = folder_of(tmp_path, sentence_pieces(), "LlamaTokenizerFast", "llama")
    assert tokenizer_findings(folder, load_tokenizer(folder), ASKED)[0] == []


def test_what_sglang_cannot_read_is_refused(tmp_path: Path):
    folder = folder_of(tmp_path, byte_level(), "PreTrainedTokenizerFast", "llama")
    args = {"tokenizer_backend": "fastokens"}
    [problem], _ = tokenizer_findings(folder, load_tokenizer(folder), args)
    assert "SGLang cannot read the tokenizer" in problem
