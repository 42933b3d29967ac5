"""The runs: settings that replace the quickstart's, and the cause that is to be named. Written by hand."""

from dataclasses import dataclass

PLUGINS = "tests.diagnoses.plugins"
FAST = ("actor.optimizer.lr=1e-3", "actor.optimizer.warmup_steps=1")


@dataclass(frozen=True)
class Case:
    """A run."""

    name: str
    causes: tuple[str, ...] = ()
    """Names of causes, one of which must come first or second. Empty: the run is healthy."""
    settings: tuple[str, ...] = ()
    steps: int = 8
    rows: int | None = None
    """Number of its prompts; None: all of the quickstart's."""
    kill_at: int | None = None
    """Step after which the run is killed; None: it ends by itself."""


def _reward(name: str) -> str:
    return f"rollout.reward={{path: {PLUGINS}.{name}}}"


BROKEN = (
    Case("all wrong", ("all-wrong",), ("rollout.reward.args.marker=none",)),
    Case("all right", ("all-right",), (_reward("anything_goes"),)),
    Case("constant reward", ("constant-reward",), (_reward("undecided"),), kill_at=6),
    Case("reward by prompt", ("equal-groups",), (_reward("by_prompt"),)),
    Case("responses cut off", ("truncated",), ("rollout.sampling.max_new_tokens=12",)),
    Case(
        "everything masked",
        ("masked",),
        ("actor.correction.token={type: mask, low: 1.0, high: 1.0}",),
    ),
    Case("reward raises", ("failing-groups",), (_reward("broken"),)),
    Case(
        "reward hangs",
        ("reward-timeouts",),
        (_reward("hangs"), "rollout.judging={timeout_s: 0.5, attempts: 1, processes: 4}"),
        steps=4,
    ),
    Case(
        "groups too old",
        ("stale",),
        (
            _reward("late"),
            "rollout.max_head_offpolicyness=1",
            "rollout.consumption={type: ready_first, on_stale: drop}",
        ),
        steps=14,
    ),
    Case("engine differs", ("mismatch",), (f"rollout.workflow={PLUGINS}.OtherNumbers",)),
    Case("no exploration", ("low-entropy",), ("rollout.sampling.temperature=0.02",)),
    Case("rate too high", ("rate-too-high",), ("actor.optimizer.lr=0.05", "actor.optimizer.warmup_steps=0")),
    Case("rate four times too high", ("rate-too-high",), ("actor.objective={type: cispo}", *FAST), steps=14),
    Case("rate too low", ("rate-too-low",), ("actor.optimizer.lr=1e-10",)),
    Case(
        "drift limit binds",
        ("drift-limit",),
        (*FAST, "actor.drift={kl: 1e-9}"),
        steps=12,
    ),
    Case("few prompts", ("few-prompts",), steps=12, rows=3),
    Case(
        "updates skipped",
        ("skipped-updates",),
        (
            f"actor.objective={{type: plugin, path: {PLUGINS}.NotFinite}}",
            "run.max_skipped_updates=1000",
            "actor.microbatch_tokens=512",
        ),
    ),
    Case("filter keeps little", ("filtered",), (f"rollout.group_filter={PLUGINS}.NearlyNothing",)),
    Case(
        "clip too narrow",
        ("clipped",),
        ("actor.objective={type: ppo, clip_low: 1e-7, clip_high: 1e-7}", "actor.minibatches=16"),
    ),
)

HEALTHY = (
    Case("as shipped", steps=14),
    Case(
        "synchronous, one update a step",
        settings=("rollout.max_head_offpolicyness=0", "actor.minibatches=1"),
        steps=14,
    ),
    Case("gspo", settings=("actor.objective={type: gspo}", "run.seed=1"), steps=14),
    Case("cispo", settings=("actor.objective={type: cispo}", "run.seed=3"), steps=14),
    Case("drift limit that leaves room", settings=("actor.drift={kl: 0.05}", "run.seed=2"), steps=14),
)
