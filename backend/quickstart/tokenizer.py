"""Tokenizers of small policies in the Hugging Face format: a vocabulary is a list of symbols.

A symbol is a character, or a text of several that is one token. The quickstart has 48, special ones included.

Conversations have two kinds of turns. A turn of the policy is `<|assistant|>...<eos>`; every turn that the
policy reads (user, system, tool) is `<|user|>...`. Rendering is therefore append-only: the ids of a
conversation begin with the prompt ids that each assistant turn was sampled from, followed by the ids of the
turn.
"""

import re
from collections import Counter
from collections.abc import Sequence

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from slipstream.backend.quickstart.task import SYMBOLS

PAD, EOS, USER, ASSISTANT = "<pad>", "<eos>", "<|user|>", "<|assistant|>"
SPECIAL = (PAD, EOS, USER, ASSISTANT)
IDS = {symbol: index for index, symbol in enumerate([*SPECIAL, *SYMBOLS])}
"""The quickstart's vocabulary. The special symbols have these ids in every vocabulary."""
UNKNOWN = "?"
"""Replaces every character outside the vocabulary, so that no text makes an engine fail."""

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


def build_tokenizer(symbols: Sequence[str] = SYMBOLS) -> PreTrainedTokenizerFast:
    """Return a tokenizer with its chat template. `AutoTokenizer` can load it after `save_pretrained`.

    Where several symbols fit, the longest one is the token. `UNKNOWN` is added if it is missing. Texts are
    lower-cased unless a symbol has upper-case letters. Raises ValueError for empty, repeated and special
    symbols.
    """
    known = [*SPECIAL, *symbols, *([] if UNKNOWN in symbols else [UNKNOWN])]
    wrong = [symbol for symbol, times in Counter(known).items() if times > 1 or not symbol]
    if wrong:
        raise ValueError(f"the symbols {wrong} are empty, repeated or special: expected each symbol once")
    ids = {symbol: index for index, symbol in enumerate(known)}
    backend = Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))
    if not any(symbol != symbol.lower() for symbol in symbols):
        backend.normalizer = normalizers.Lowercase()
    longest_first = sorted(symbols, key=len, reverse=True)
    pattern = "|".join([*map(re.escape, longest_first), r"[\s\S]"])
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
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
