"""The quickstart's tokenizer: 48 symbols, one per character, in the Hugging Face format.

Conversations have two kinds of turns. A turn of the policy is `<|assistant|>...<eos>`; every turn that the
policy reads (user, system, tool) is `<|user|>...`. Rendering is therefore append-only: the ids of a
conversation begin with the prompt ids that each assistant turn was sampled from, followed by the ids of the
turn.
"""

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, EOS, USER, ASSISTANT = "<pad>", "<eos>", "<|user|>", "<|assistant|>"
SPECIAL = (PAD, EOS, USER, ASSISTANT)
SYMBOLS = "abcdefghijklmnopqrstuvwxyz0123456789#+=-?. ,"
IDS = {symbol: index for index, symbol in enumerate([*SPECIAL, *SYMBOLS])}
"""The vocabulary."""
UNKNOWN = "?"
"""Replaces every character outside SYMBOLS after lower-casing, so that no text makes an engine fail."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    f"{ASSISTANT}{{{{ message['content'] }}}}{EOS}"
    "{% else %}"
    f"{USER}{{{{ message['content'] }}}}"
    "{% endif %}"
    "{% endfor %}"
    f"{{% if add_generation_prompt %}}{ASSISTANT}{{% endif %}}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer with its chat template. `AutoTokenizer` can load it after `save_pretrained`."""
    backend = Tokenizer(models.WordLevel(IDS, unk_token=UNKNOWN))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(list(SPECIAL))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def prompt_text(prompt: str) -> str:
    """Return one user message in the chat template, which the policy is asked to continue."""
    return f"{USER}{prompt}{ASSISTANT}"


def demonstration_text(prompt: str, response: str) -> str:
    """Return a finished conversation of one turn: a user and an assistant message in the chat template."""
    return f"{prompt_text(prompt)}{response}{EOS}"
