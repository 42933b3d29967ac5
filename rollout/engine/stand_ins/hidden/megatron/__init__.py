"""Hides Megatron from SGLang, which imports it wherever it is installed, for a tool of its debugging.

Megatron sets ``torch_memory_saver.hook_mode`` to "torch" when its inference is imported. An engine that gives
up its GPU memory captures CUDA graphs only in the mode "preload".
"""

raise ImportError("Megatron is hidden from engines: rollout/engine/stand_ins")
