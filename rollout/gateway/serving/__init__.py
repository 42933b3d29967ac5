"""Answers users in OpenAI's, Anthropic's and SGLang's protocols, by SGLang's code, from a ``TokenSource``."""
