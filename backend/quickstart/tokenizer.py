"""The quickstart's tokenizer: 48 symbols, one per character, in the Hugging Face format.

Conversations have two kinds of turn. What the policy wrote is `<|assistant|>...<eos>`; all it reads, whoever
said it (user, system, tool), is `<|user|>...`. Hence rendering is append-only: the ids of a conversation
begin with the ids of the prompt that each assistant turn was sampled from, followed by the ids of that turn.
"""

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, EOS, USER, ASSISTANT = "<pad>", "<eos>", "<|user|>", "<|assistant|>"
SPECIAL = (PAD, EOS, USER, ASSISTANT)
SYMBOLS = "abcdefghijklmnopqrstuvwxyz0123456789#+=-?. ,"
UNKNOWN = "?"
"""Stands for every character outside SYMBOLS (after lowering its case), so no text makes an engine fail."""

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
    """The tokenizer with its chat template; `save_pretrained` makes it loadable by `AutoTokenizer`."""
    vocabulary = {symbol: index for index, symbol in enumerate([*SPECIAL, *SYMBOLS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
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
    """What the policy is asked to continue: the chat template applied to one user message."""
    return f"{USER}{prompt}{ASSISTANT}"


def demonstration_text(prompt: str, response: str) -> str:
    """A finished single-turn conversation: the chat template applied to a user and an assistant message."""
    return f"{prompt_text(prompt)}{response}{EOS}"
