"""Tokenizers read tokenizer.json as it is, whatever class tokenizer_config.json names."""

import json
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from slipstream.backend.commands.check_tokenizer import TEXTS, tokenizer_findings
from slipstream.rollout.tokens.tokenizer import load_tokenizer, raw_tokenizer

CORPUS = ["Weather in Paris is nice, and it's 12345.678 here.\n\tdef f(x):\n    return x\n"] * 3
LLAMA_3 = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def trained(raw: Tokenizer, **settings: object) -> Tokenizer:
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<s>", "</s>", "<unk>"],
        initial_alphabet=settings.pop("alphabet", []),
        show_progress=False,
    )
    raw.train_from_iterator(CORPUS, trainer)
    return raw


def byte_level() -> Tokenizer:
    raw = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(LLAMA_3), "isolated")
    raw.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    raw.decoder = decoders.ByteLevel()
    return trained(raw, alphabet=pre_tokenizers.ByteLevel.alphabet())


def ignoring_merges() -> Tokenizer:
    """As of Llama 3: a word of the vocabulary is one token, whatever the merges make of it."""
    content = json.loads(byte_level().to_str())
    assert "Weather" in content["model"]["vocab"]
    content["model"]["ignore_merges"] = True
    content["model"]["merges"] = content["model"]["merges"][:20]
    return Tokenizer.from_str(json.dumps(content))


def composing() -> Tokenizer:
    raw = byte_level()
    raw.normalizer = normalizers.NFC()
    return raw


def lowering() -> Tokenizer:
    raw = byte_level()
    raw.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.Lowercase()])
    return raw


def sentence_pieces() -> Tokenizer:
    """As of Llama 2: a prefix space by the normalizer, and no pre-tokenizer."""
    raw = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return trained(raw, alphabet=[f"<0x{byte:02X}>" for byte in range(3)])


FILES = {make.__name__: make for make in (byte_level, ignoring_merges, composing, lowering, sentence_pieces)}
CLASSES = [
    "LlamaTokenizerFast",
    "LlamaTokenizer",
    "CodeLlamaTokenizerFast",
    "GemmaTokenizerFast",
    "Qwen2TokenizerFast",
    "GPT2TokenizerFast",
    "PreTrainedTokenizerFast",
    "NoSuchTokenizer",
    None,
]
MODELS = ["llama", "qwen3", "mistral", "deepseek_v3"]


def folder_of(folder: Path, raw: Tokenizer, name: str | None, model: str) -> Path:
    raw.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "clean_up_tokenization_spaces": True}
    named = {} if name is None else {"tokenizer_class": name}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | named))
    (folder / "config.json").write_text(json.dumps({"model_type": model}))
    return folder


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("file", FILES)
def test_ids_and_texts_are_those_of_the_file(file: str, name: str | None, model: str, tmp_path: Path):
    folder = folder_of(tmp_path, FILES[file](), name, model)
    raw, tokenizer = raw_tokenizer(folder), load_tokenizer(folder)
    for text in [*TEXTS, "</s> a</s>\n b", "Weather , isn 't it ?"]:
        ids = raw.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, add_special_tokens=False) == ids
        assert tokenizer.decode(ids) == raw.decode(ids, skip_special_tokens=False)
    assert tokenizer_findings(folder, tokenizer, None) == ([], [])


def test_settings_without_effect_are_not_restored(tmp_path: Path):
    """Qwen's files differ from its class in them, and SGLang needs not be asked."""
    settings = {"tokenizer_class": "Qwen2TokenizerFast", "eos_token": "<|endoftext|>"}
    raw = Tokenizer(models.BPE(continuing_subword_prefix="", end_of_word_suffix=""))
    raw.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), "isolated")
    level = pre_tokenizers.ByteLevel(False, trim_offsets=False, use_regex=False)
    raw.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    content = json.loads(trained(raw, alphabet=pre_tokenizers.ByteLevel.alphabet()).to_str())
    content["decoder"] = content["pre_tokenizer"]["pretokenizers"][1]
    folder_of(tmp_path, Tokenizer.from_str(json.dumps(content)), None, "qwen3")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert load_tokenizer(tmp_path).restored == []


def test_a_class_that_reads_otherwise_is_refused_with_the_text(tmp_path: Path):
    folder = folder_of(tmp_path, byte_level(), "PreTrainedTokenizerFast", "llama")
    tokenizer = load_tokenizer(folder)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    ([problem], _) = tokenizer_findings(folder, tokenizer, None)
    assert "reads 'Weather in  Paris?' otherwise than tokenizer.json" in problem
    assert '"tokenizer_class": "PreTrainedTokenizerFast"' in problem


def test_a_file_that_loses_blanks_itself_is_told(tmp_path: Path):
    raw = byte_level()
    raw.normalizer = normalizers.Replace(" ", "")
    folder = folder_of(tmp_path, raw, "PreTrainedTokenizerFast", "llama")
    problems, [note] = tokenizer_findings(folder, load_tokenizer(folder), None)
    assert not problems and "loses blanks itself: 'Weather in  Paris?' becomes 'WeatherinParis?'" in note


def test_begin_tokens_are_added_as_transformers_4_and_the_engines_do(tmp_path: Path):
    folder = folder_of(tmp_path, byte_level(), "LlamaTokenizerFast", "deepseek_v3")
    assert load_tokenizer(folder).encode("a")[0] == 0
    folder = folder_of(tmp_path, byte_level(), "PreTrainedTokenizerFast", "deepseek_v3")
    assert load_tokenizer(folder).encode("a")[0] != 0
