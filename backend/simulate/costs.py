"""The cost model in words: what every simulated figure rests on."""

from collections.abc import Iterator

import numpy as np

from slipstream.configs.schema import RunConfig
from slipstream.configs.schema.simulate import LengthModel, SimulateConfig


def cost_model(config: RunConfig, model: SimulateConfig, lengths: np.ndarray | None) -> list[str]:
    """One line for each part that takes time, with the constants in force."""
    return list(_lines(config, model, lengths))


def _lines(config: RunConfig, model: SimulateConfig, lengths: np.ndarray | None) -> Iterator[str]:
    engine, trainer, transfer = model.engine, model.trainer, model.transfer
    yield (
        f"decode step {1e3 * engine.step_s:.4g} ms + {1e3 * engine.request_s:.4g} ms per running request"
        + (f", times {engine.slowdown:g} during training" if engine.slowdown > 1 else "")
        + f"; prefill {engine.prefill_tokens_per_s:,.0f} tokens/s; at most {engine.max_running} requests"
        + (f" and {engine.kv_tokens:,} tokens of KV" if engine.kv_tokens else "")
        + " on an engine"
    )
    yield (
        f"training step {trainer.step_s:.4g} s + {trainer.tokens_per_s:,.0f} tokens/s and GPU"
        + (f", times {trainer.slowdown:g} while engines decode" if trainer.slowdown > 1 else "")
    )
    pause_s = transfer.pause_s + transfer.total_bytes / transfer.bytes_per_s
    yield (
        f"publication {transfer.prepare_s:.3g} s, then a pause of {pause_s:.3g} s: {transfer.pause_s:g} s + "
        f"{transfer.total_bytes / 1e9:.3g} GB at {transfer.bytes_per_s / 1e9:.3g} GB/s"
        f"; abort: {1e3 * engine.resend_s:g} ms more per running request"
    )
    yield f"responses {_responses(config, model, lengths)}; prompts {_log_normal(model.prompts, None)}"
    failures = model.failures
    mishaps = [
        f"an engine fails every {failures.engine_mean_time_s:g} s, back after {failures.engine_restart_s:g} s"
        if failures.engine_mean_time_s
        else "no engine fails",
        f"{failures.episode:.2%} of the episodes fail" if failures.episode else "no episode fails",
    ]
    yield (
        f"rewards after {model.reward.median_s:g} s (median; sigma {model.reward.sigma:g}); "
        + ", ".join(mishaps)
    )


def _responses(config: RunConfig, model: SimulateConfig, lengths: np.ndarray | None) -> str:
    if lengths is None:
        text = _log_normal(model.responses, config.rollout.sampling.max_new_tokens)
    else:
        kind = "given lengths" if lengths.ndim == 1 else "lengths, group by group as they came"
        text = f"of {lengths.size:,} {kind}: mean {lengths.mean():,.0f}, longest {lengths.max():,}"
    if model.responses.straggler_fraction:
        straggle = model.responses
        text += f", {straggle.straggler_fraction:.1%} of them {straggle.straggler_factor:g} times longer"
    return text


def _log_normal(model: LengthModel, longest: int | None) -> str:
    cap = model.cap or longest
    return f"log-normal, median {model.median:,.0f}, sigma {model.sigma:.3g}, at most {cap:,}"
