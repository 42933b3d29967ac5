"""Tokenizers and processors of model folders."""


def load_tokenizer(name_or_path: str, **kwargs):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name_or_path, **kwargs)


def load_processor(name_or_path: str, **kwargs):
    """Return the multimodal processor of a model folder; None: it has none."""
    import transformers

    try:
        processor = transformers.AutoProcessor.from_pretrained(name_or_path, **kwargs)
    except (OSError, ValueError):
        return None
    return processor if isinstance(processor, transformers.ProcessorMixin) else None
