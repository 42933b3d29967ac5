"""Imports for the process that the tests' ranks are forked from: else each of them makes these imports again.

The modules with the functions of ranks are not among them, because some change what they import.
"""

from pathlib import Path

from slipstream.rollout.system.garbage import kept_for_good

if not Path("/dev/nvidiactl").exists():
    with kept_for_good():
        import numpy.testing
        import pytest
        import yaml
        from transformers import (
            AutoModelForCausalLM,
            AutoModelForSequenceClassification,
            Qwen3ForCausalLM,
        )

    __all__ = [
        "AutoModelForCausalLM",
        "AutoModelForSequenceClassification",
        "Qwen3ForCausalLM",
        "numpy",
        "pytest",
        "yaml",
    ]
