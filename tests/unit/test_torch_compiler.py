"""Loading a tokenizer imports nothing of torch's compiler, and whoever needs it has it."""

import subprocess
import sys

from slipstream.backend.quickstart.tokenizer import build_tokenizer

PROGRAM = """
import sys
from pathlib import Path
from slipstream.rollout.tokens.tokenizer import load_tokenizer

load_tokenizer(Path(sys.argv[1]))
assert not [name for name in sys.modules if name.startswith("torch._dynamo")]

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

config = Qwen3Config(
    vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, head_dim=4,
)
ids = torch.tensor([[1, 2, 3], [0, 1, 2]])
for attention in ("eager", "sdpa"):
    model = Qwen3ForCausalLM._from_config(config, attn_implementation=attention)
    print(model(ids, attention_mask=(ids > 0).long()).logits.shape)
compiled = torch.compile(lambda x: x + 1, backend="eager")
assert compiled(torch.ones(1)).item() == 2

from transformers.masking_utils import TransformGetItemToIndex
with TransformGetItemToIndex():
    values = torch.arange(3)
    assert torch.vmap(lambda i: values[i])(torch.tensor([2, 0])).tolist() == [2, 0]
"""


def test_a_tokenizer_is_loaded_without_torchs_compiler_and_models_still_have_it(tmp_path):
    build_tokenizer().save_pretrained(tmp_path)
    ended = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == ["torch.Size([2, 3, 8])"] * 2
