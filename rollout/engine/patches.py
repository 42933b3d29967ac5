"""Every place at which Slipstream changes SGLang, or takes part in what it does inside: the one list.

A patch is written against the source of a function. ``check`` compares the source with that of the version
that the patches were written for, before any of them is made: a function that has changed would be replaced
by one that does less, or not be called at all, and nothing else would say so.

To move to another version of SGLang, read what has changed in each function that ``check`` names, look
whether SGLang now offers what the patch does, and then write ``VERSION`` and the digests anew
(`python -m slipstream.rollout.engine.patches` prints them).
"""

import ast
import hashlib
import importlib.util
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

VERSION = "0.5.21"
"""The release of SGLang that the patches were written for."""


class ChangedSource(RuntimeError):
    """SGLang is another release, and has changed what a patch replaces."""


@dataclass(frozen=True)
class EnginePatch:
    """A change of a function inside SGLang."""

    target: str
    """``module:name``: what is replaced, or what reads the variables that are set."""
    by: str
    """Import path of the function that makes the change."""
    why: str
    """What SGLang lacks."""
    digest: str
    """Of the target's source in ``VERSION``."""


LAUNCH = "slipstream.rollout.engine.launch"
"""Import path of the module that is ``__main__`` in a server's process."""

DEAD_ENDS = "slipstream.rollout.engine.dead_ends"
_RESULTS = "sglang.srt.managers.scheduler_components.batch_result_processor:SchedulerBatchResultProcessor"
_CPU = "slipstream.rollout.engine.cpu"
_ADAPTERS, _GATEWAY = "slipstream.rollout.engine.adapters", "slipstream.rollout.gateway.serving.answering"

PATCHES = (
    EnginePatch(
        "sglang.srt.entrypoints.http_server:_setup_and_run_http_server",
        f"{LAUNCH}._require_key",
        "its api_key leaves out routes, and what is added to the app after it",
        "0622221a1b7ebefc",
    ),
    EnginePatch(
        "sglang.srt.distributed.bootstrap:_resolve_dist_init_method",
        f"{LAUNCH}._open_store",
        "it opens the store of its ranks on every interface of the machine",
        "89859e3f97159a4f",
    ),
    EnginePatch(
        "sglang.srt.utils.common:launch_dummy_health_check_server",
        f"{LAUNCH}._be_another_node",
        "the server of health checks on other nodes asks for no key",
        "cef3822115c1479d",
    ),
    EnginePatch(
        "sglang.srt.utils.network:wait_port_available",
        f"{LAUNCH}._be_another_node",
        "a node that is not the first waits until the ports of the first one are free on itself",
        "14804bbcba1e238e",
    ),
    EnginePatch(
        "sglang.srt.server_args:PortArgs.init_new",
        f"{LAUNCH}._announce_shared_memory",
        "it never removes the file in which schedulers publish their load",
        "8b113ed3669aea98",
    ),
    EnginePatch(
        "sglang.srt.managers.load_snapshot:shm_path_for",
        f"{LAUNCH}._announce_shared_memory",
        "the name of that file",
        "9919ab9421786959",
    ),
    EnginePatch(
        "sglang.srt.entrypoints.engine:_set_envs_and_config",
        f"{_CPU}.fork_processes",
        "it spawns processes, which import SGLang anew; only CUDA needs that",
        "6b7e92c6990c80e8",
    ),
    EnginePatch(
        "sglang.srt.models.deepseek_common.attention_backend_handler:_dispatch_mla_subtype",
        f"{_CPU}.attend_to_cached_latents",
        "no choice of latent attention for torch_native",
        "a6ff22fdde9301cf",
    ),
    EnginePatch(
        "sglang.srt.layers.attention.torch_native_backend:TorchNativeAttnBackend",
        f"{_CPU}.fill_padding",
        "no value to fill batches of data-parallel attention with",
        "50c31fce23db30f5",
    ),
    EnginePatch(
        "sglang.srt.mem_cache.pool_host.common:_cuda_host_register",
        f"{_CPU}.register_no_memory",
        "it registers the host's memory with CUDA on machines that have none",
        "1ab150bdd2f3c0a0",
    ),
    EnginePatch(
        "sglang.srt.managers.tokenizer_manager:TokenizerManager._resolve_lora_path",
        f"{_ADAPTERS}._resolve_policy",
        "a request is bound to a name of an adapter, and the policy's adapter has another in each version",
        "a0718ec3647eaae1",
    ),
    EnginePatch(
        "sglang.srt.managers.tokenizer_manager:TokenizerManager.pause_generation",
        f"{_ADAPTERS}._cut_off_at_once",
        "it looks once a second whether the requests that it cuts off have ended",
        "a1a2a1a47255a080",
    ),
    EnginePatch(
        "sglang.srt.entrypoints.openai.serving_chat:normalize_assistant_tool_call_arguments",
        f"{_GATEWAY}._let_calls_be_repeated",
        "it refuses conversations that repeat a call whose arguments are no JSON object",
        "8a76611e007991da",
    ),
    EnginePatch(
        "sglang.srt.function_call.function_call_parser:FunctionCallParser",
        f"{_GATEWAY}._let_calls_be_repeated",
        "it leaves out calls of unknown tools, calls that it cannot read, and text after calls",
        "8b07e574e398997b",
    ),
    EnginePatch(
        "sglang.srt.constrained.xgrammar_backend:XGrammarGrammar.fill_vocab_mask",
        f"{DEAD_ENDS}.guard",
        "a grammar that allows no token ends the scheduler",
        "df27a6836c85a27c",
    ),
    EnginePatch(
        f"{_RESULTS}._apply_prefill_grammar",
        f"{DEAD_ENDS}.guard",
        "a request whose grammar rejects its token ends as one that was aborted, and would be sent again",
        "3d9a09dc6d547224",
    ),
    EnginePatch(
        f"{_RESULTS}._accept_grammar_tokens",
        f"{DEAD_ENDS}.guard",
        "the same behind the first token",
        "549c2c2e2e3c8eff",
    ),
)


def check(*modules: str) -> None:
    """Raise ChangedSource if SGLang has changed what the functions of some modules of ours replace.

    The release that the patches were written for is not read: a test compares its source.
    """
    release = installed()
    if release == VERSION:
        return
    made = [patch for patch in PATCHES if patch.by.rpartition(".")[0] in modules]
    if changed := changes(made):
        raise ChangedSource(
            f"SGLang {release} found, {VERSION} expected: {', '.join(changed)} differ from what "
            "rollout/engine/patches.py replaces; install the pinned version (`make install`)"
        )


def installed() -> str:
    """Return the release of SGLang in this environment."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return "without metadata"


def changes(patches: Collection[EnginePatch] = PATCHES) -> list[str]:
    """Return the targets whose source is not the one that the patches were written for."""
    return [patch.target for patch in patches if digest_of(patch.target) != patch.digest]


def digest_of(target: str) -> str:
    """Return the digest of a function's or class's source; empty if there is none of that name."""
    module, _, name = target.partition(":")
    text, node = _parsed(module)
    for part in name.split("."):
        body = node.body if isinstance(node, ast.Module | ast.ClassDef) else []
        found = [each for each in body if getattr(each, "name", None) == part]
        if not found:
            return ""
        node = found[-1]
    source = ast.get_source_segment(text, node) or ""
    return hashlib.sha256(source.encode()).hexdigest()[:16]


@cache
def _parsed(module: str) -> tuple[str, ast.AST]:
    """Return the source of a module, which is not imported: SGLang takes seconds, and a GPU in places."""
    package, *inside = module.split(".")
    spec = importlib.util.find_spec(package)
    folders = spec.submodule_search_locations if spec else None
    file = Path(next(iter(folders or ())), *inside).with_suffix(".py") if folders else None
    text = file.read_text(encoding="utf-8") if file and file.is_file() else ""
    return text, ast.parse(text)


if __name__ == "__main__":
    for each in PATCHES:
        print(each.target, digest_of(each.target))
