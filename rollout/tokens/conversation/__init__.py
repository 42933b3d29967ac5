"""Conversations as token ids: which messages are the same, and which ids two prompts have in common."""
