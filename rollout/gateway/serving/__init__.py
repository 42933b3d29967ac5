"""Endpoints: OpenAI's, Anthropic's and SGLang's own, by SGLang's code, with tokens from a ``TokenSource``."""
