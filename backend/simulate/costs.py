"""The cost model in words: everything that a simulated figure rests on."""

from slipstream.backend.simulate.compare import Work
from slipstream.backend.simulate.gpu_split import model_of
from slipstream.backend.simulate.publication import transport_of
from slipstream.configs.schema.simulate import FailureModel, LengthModel


def cost_model(work: Work) -> list[str]:
    """Return one line for each activity that takes time, with its constants."""
    model = model_of(work.config)
    engine, trainer, transfer, failures = model.engine, model.trainer, model.transfer, model.failures
    slow_engine = f", times {engine.slowdown:g} during training" if engine.slowdown > 1 else ""
    slow_trainer = f", times {trainer.slowdown:g} while engines decode" if trainer.slowdown > 1 else ""
    memory = f" and {engine.kv_tokens:,} tokens of KV" if engine.kv_tokens else ""
    engine_failures = (
        f"an engine fails every {failures.engine_mean_time_s:g} s, back after {failures.engine_restart_s:g} s"
        if failures.engine_mean_time_s
        else "no engine fails"
    )
    episode_failures = (
        f"{failures.episode:.2%} of the episodes fail" if failures.episode else "no episode fails"
    )
    return [
        f"decode step {1e3 * engine.step_s:.4g} ms + {1e3 * engine.request_s:.4g} ms per running request"
        f"{slow_engine}; prefill {engine.prefill_tokens_per_s:,.0f} tokens/s; at most {engine.max_running} "
        f"requests{memory} on an engine",
        f"training step {trainer.step_s:.4g} s + {trainer.tokens_per_s:,.0f} tokens/s and GPU{slow_trainer}",
        f"publication by {transport_of(work.config)}: {transfer.prepare_s:.3g} s, then a pause of "
        f"{transfer.stall_s:.3g} s: {transfer.pause_s:g} s + {transfer.bytes / 1e9:.3g} GB at "
        f"{transfer.bytes_per_s / 1e9:.3g} GB/s"
        f"; abort: {1e3 * engine.resend_s:g} ms more per running request",
        f"responses {_responses(work)}; prompts {_log_normal(model.prompts, None)}",
        f"rewards after {model.reward.median_s:g} s (median; sigma {model.reward.sigma:g}); "
        f"{engine_failures}, {episode_failures}",
        *_failures_of_trainer(failures),
    ]


def _failures_of_trainer(model: FailureModel) -> list[str]:
    if not model.of_trainer:
        return []
    ranks = (
        f"a trainer rank dies every {model.trainer_mean_time_s:g} s, back after {model.trainer_restart_s:g} s"
        if model.trainer_mean_time_s
        else "no trainer rank dies"
    )
    nodes = (
        f"a node fails every {model.node_mean_time_s:g} s, back after {model.node_repair_s:g} s, with "
        f"{model.spare_nodes} spare ones and {model.engine_placement} engines; the trainer is back after "
        f"{model.trainer_node_restart_s:g} s, and after {model.job_restart_s:g} s with the job"
        if model.node_mean_time_s
        else "no node fails"
    )
    return [f"{ranks}; {nodes}"]


def _responses(work: Work) -> str:
    model, lengths = model_of(work.config).responses, work.lengths
    if lengths is None:
        text = _log_normal(model, work.config.rollout.sampling.max_new_tokens)
    else:
        kind = "given lengths" if lengths.ndim == 1 else "lengths, group by group as they came"
        text = f"of {lengths.size:,} {kind}: mean {lengths.mean():,.0f}, longest {lengths.max():,}"
    if model.straggler_fraction:
        text += f", {model.straggler_fraction:.1%} of them {model.straggler_factor:g} times longer"
    return text


def _log_normal(model: LengthModel, longest: int | None) -> str:
    cap = model.cap or longest
    return f"log-normal, median {model.median:,.0f}, sigma {model.sigma:.3g}, at most {cap:,}"
