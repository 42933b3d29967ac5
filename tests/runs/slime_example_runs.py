"""Whole runs of the example hooks of a checkout of slime, unmodified: with the alias, and with the checkout.

``tests.slime_contract`` runs them. SLIME_CHECKOUT names the checkout; SLIME_SOURCES what the hooks shall
import from: ``alias``, or ``alias,checkout`` for two runs of each example, side by side.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from slipstream.rollout.tokens.trajectory import Trajectory
from tests.environment import environment
from tests.runs.conftest import LaunchedRun, run_command, start_run
from tests.runs.stored import stored
from tests.runs.test_run import finish, records, summary
from tests.slime_examples import AGENTS, FILTERS, FOLDERS, retriever
from tests.slime_policy import LONGEST, write_slime_policy

CHECKOUT = Path(os.environ["SLIME_CHECKOUT"])
SOURCES = os.environ.get("SLIME_SOURCES", "alias").split(",")

STEPS, GROUPS = 5, 2
PROMPTS = 64
MIS = "examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp"

Finished = list[LaunchedRun]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the policy, prompts with each kind of label, and the examples without slime."""
    folder = tmp_path_factory.mktemp("slime")
    write_slime_policy(folder / "policy")
    labels = {"train": "4", "heldout": "4", "search": {"ground_truth": {"target": ["4"]}}}
    for name, label in labels.items():
        rows = [{"prompt": f"Question {n}: two and two?", "label": label} for n in range(PROMPTS)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shutil.copytree(CHECKOUT / "examples", folder / "hooks" / "examples")
    # A module of slime's own package, which the alias has no room for.
    shutil.copy(CHECKOUT / "slime/rollout/_fanout_test_helpers.py", folder / "hooks" / "fanout_helpers.py")
    return folder


@pytest.fixture
def run_all(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Finished]]:
    """Runs an example once for each source, to its end, and checks what must be true of every run."""
    runs: list[LaunchedRun] = []

    def start(hooks: dict[str, str], *settings: str, samples: int = 2) -> Finished:
        places = [inputs / "hooks", *(inputs / "hooks" / "examples" / each for each in FOLDERS)]
        for source in SOURCES:
            folders = [*places, CHECKOUT] if source == "checkout" else places
            monkeypatch.setenv("PYTHONPATH", environment(*folders)["PYTHONPATH"])
            common = (
                f"run.steps={STEPS}",
                "eval.every=5",
                "eval.max_prompts=2",
                "actor.minibatches=1",
                f"rollout.batch_size={GROUPS}",
                f"rollout.n_samples_per_prompt={samples}",
                "rollout.max_head_offpolicyness=1",
                f"rollout.sampling.max_new_tokens={LONGEST + 8}",
                "rollout.engine.args.context_length=6144",
                "rollout.engine.args.max_total_tokens=32768",
                "rollout.reward=null",
                *(f"rollout.hooks.{name}={path}" for name, path in hooks.items()),
            )
            runs.append(start_run(inputs, tmp_path, source, *common, *settings))
        for run in runs:
            assert finish(run, 420) == 0, run.output()
            check(run)
        return runs

    yield start
    for run in runs:
        run.end()
    shutil.rmtree(tmp_path, ignore_errors=True)


def check(run: LaunchedRun) -> None:
    """The run has trained every group, nothing has failed, and its ledger is without a discrepancy."""
    groups = summary(run)["groups"]
    assert (groups["trained"], groups["failed"]) == (STEPS * GROUPS, 0), run.output()
    assert len(records(run)) == STEPS
    audit = subprocess.run(
        run_command("audit", str(run.folder), "--json"), capture_output=True, text=True, timeout=240
    )
    assert json.loads(audit.stdout)["clean"], audit.stdout + audit.stderr
    run.assert_nothing_left()


def texts(run: LaunchedRun, inputs: Path) -> list[tuple[str, str]]:
    """Return the text of each trajectory of a run, and that of its tokens that carry loss."""
    tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(inputs / "policy")
    parts: list[Trajectory] = [
        part for episode in stored(run.folder).trajectories.values() for part in episode.split()
    ]
    assert all((part.logprobs_T[part.loss_mask_T] < 0).all() for part in parts)
    return [
        (str(tokenizer.decode(part.tokens_T)), str(tokenizer.decode(part.tokens_T[part.loss_mask_T])))
        for part in parts
    ]


@pytest.mark.timeout(900)
def test_retool_with_a_filter_and_a_loss_of_its_own(run_all, inputs):
    hooks = {
        "custom_generate_function": "generate_with_retool.generate",
        "custom_rm": "generate_with_retool.reward_func",
        "dynamic_sampling_filter": f"{FILTERS}.check_reward_nonzero_std",
        "custom_tis_function": MIS,
        "custom_config_path": str(inputs / "hooks/examples/train_infer_mismatch_helper/mis.yaml"),
    }
    for run in run_all(hooks, "rollout.reward_key=score", samples=4):
        spoken = texts(run, inputs)
        called = [trained for text, trained in spoken if "<interpreter>\nOutput:" in text]
        assert called and not any("<interpreter>" in trained for trained in called)
        assert all("hook/mis_tis_weight_before_bound" in record for record in records(run))


@pytest.mark.timeout(900)
def test_search_with_prompts_as_text_and_versions_on_a_disk(run_all, inputs, tmp_path, monkeypatch):
    hooks = {
        "custom_generate_function": "generate_with_search.generate",
        "custom_rm": "generate_with_search.reward_func",
        "custom_update_weight_post_write": "tests.runs.slime_written.note",
    }
    seen = tmp_path / "versions.jsonl"
    monkeypatch.setenv("SLIME_VERSIONS_SEEN", str(seen))
    settings = (
        f"data.path={inputs / 'search.jsonl'}",
        f"eval.path={inputs / 'search.jsonl'}",
        "weights.transport.type=disk",
    )
    with retriever():
        runs = run_all(hooks, *settings)
    for run in runs:
        spoken = texts(run, inputs)
        found = [trained for text, trained in spoken if "<information>Doc 1" in text]
        assert found and not any("<information>" in trained for trained in found)
        assert all(trained.endswith(("</answer>", "</search>")) for trained in found[:1])
    versions = [json.loads(line) for line in seen.read_text().splitlines()]
    assert len(versions) >= STEPS * len(runs)
    for version in versions:
        weights = [size for name, size in version["files"].items() if name.endswith(".safetensors")]
        assert weights and min(weights) > 0 and version["engines"]


@pytest.mark.timeout(900)
def test_agents_that_return_lists(run_all, inputs):
    hooks = {
        "custom_generate_function": f"{AGENTS}.generate_with_multi_agents",
        "rm_type": "math",
    }
    for run in run_all(hooks):
        sizes = {len(episode.split()) for episode in stored(run.folder).trajectories.values()}
        assert max(sizes) > 5, "solvers, rewriters and a selector"


@pytest.mark.timeout(900)
def test_a_fan_out_of_one_to_three_samples(run_all, inputs, tmp_path, monkeypatch):
    counted = tmp_path / "counted"
    monkeypatch.setenv("SLIME_FANOUT_TEST_COUNTER_FILE", str(counted))
    hooks = {
        "custom_generate_function": "fanout_helpers.compact_generate",
        "custom_reward_post_process": "fanout_helpers.grpo_normalize_by_group_index",
        "rm_type": "math",
    }
    runs = run_all(hooks)
    for run in runs:
        sizes = {len(episode.split()) for episode in stored(run.folder).trajectories.values()}
        assert sizes == {1, 2, 3}
    assert len(counted.read_text().splitlines()) >= STEPS * GROUPS * 2 * len(runs)
