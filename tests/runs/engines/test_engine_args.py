"""Fields of ``rollout.engine.args`` that a recipe may set change no log-prob."""

import numpy as np
import pytest

from slipstream.configs.installed.sglang_fields import SGLANG_FIELDS
from tests.runs.engines.conftest import VOCAB, Server, serve

ARGS: dict[str, dict[str, object]] = {
    "memory and kernels": {
        "attention_backend": "torch_native",
        "chunked_prefill_size": 16,
        "context_length": 128,
        "disable_cuda_graph": True,
        "disable_radix_cache": True,
        "enable_fp32_lm_head": True,
        "max_prefill_tokens": 64,
        "max_running_requests": 2,
        "max_total_tokens": 512,
        "mem_fraction_static": 0.2,
        "schedule_policy": "lof",
    },
    "order, time and logs": {
        "decode_log_interval": 1,
        "default_priority_value": 1,
        "disable_overlap_schedule": True,
        "dist_timeout": 300,
        "enable_metrics": True,
        "enable_priority_scheduling": True,
        "log_level": "warning",
        "log_level_http": "error",
        "priority_scheduling_preemption_threshold": 5,
        "radix_eviction_policy": "lfu",
        "retraction_policy": "priority",
        "schedule_conservativeness": 0.8,
        "show_time_cost": True,
        "sleep_on_idle": False,
        "soft_watchdog_timeout": 100,
        "watchdog_timeout": 200,
        "weight_loader_disable_mmap": True,
    },
}


@pytest.mark.parametrize("kind", ARGS)
def test_a_server_with_other_settings_has_the_same_log_probs(checkpoint, server: Server, tmp_path, kind: str):
    args = ARGS[kind]
    assert all(SGLANG_FIELDS[name].kind == "allowed" for name in args)
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, VOCAB, length).tolist() for length in (5, 40, 100)]
    expected = server.probe(sequences)
    with serve(checkpoint, tmp_path / "engine.log", args=args) as other:
        found = other.probe(sequences)
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-4)
