"""Prompts that are drawn from a source beside the driver, and are on disk before they are used."""

from slipstream.rollout.prompts.sources.source import DataSource

__all__ = ["DataSource"]
