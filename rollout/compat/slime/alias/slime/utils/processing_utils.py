"""Tokenizers and processors of model folders."""

from pathlib import Path


def load_tokenizer(name_or_path: str, **kwargs):
    from transformers import AutoTokenizer

    from slipstream.rollout.tokens.tokenizer import restore

    tokenizer = AutoTokenizer.from_pretrained(name_or_path, **kwargs)
    restore(tokenizer, Path(name_or_path))
    return tokenizer


def load_processor(name_or_path: str, **kwargs):
    """Return the multimodal processor of a model folder; None: it has none."""
    import transformers

    try:
        processor = transformers.AutoProcessor.from_pretrained(name_or_path, **kwargs)
    except (OSError, ValueError):
        return None
    return processor if isinstance(processor, transformers.ProcessorMixin) else None
