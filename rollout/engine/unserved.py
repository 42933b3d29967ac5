"""The models that SGLang serves on GPUs alone, or only without ranks for experts."""

_GPU_INDEXER = "the indexer of its sparse attention has kernels for GPUs alone"
_LINEAR_ATTENTION = "its linear attention needs kernels of Triton or, on CPUs with AMX, of sgl_kernel"

UNSERVED_ON_CPUS = {
    "deepseek_v32": _GPU_INDEXER,
    "glm_moe_dsa": _GPU_INDEXER,
    "qwen3_next": _LINEAR_ATTENTION,
    "qwen3_5": _LINEAR_ATTENTION,
    "qwen3_5_text": _LINEAR_ATTENTION,
    "qwen3_5_moe": _LINEAR_ATTENTION,
    "qwen3_5_moe_text": _LINEAR_ATTENTION,
    "minimax_m2": "the norm over all heads of its queries and keys is a kernel of Triton",
    "qwen3_vl": "its image processor is not imported there, and SGLang starts none of its models without",
    "gpt_oss": "torch_native, its attention for CPUs, has no sinks",
}
"""The reason, as of SGLang 0.5.21, by ``model_type``."""

UNSERVED_BY_EXPERT_RANKS = {"gpt_oss": "its loader of their biases takes each rank for one with all experts"}
"""Why SGLang 0.5.21 cannot load a model whose experts are divided among ranks, by ``model_type``."""
