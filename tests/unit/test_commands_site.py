"""The settings of a site, which all recipes share, and what a job is submitted with."""

import asyncio
import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from slipstream.backend.cli.app import app
from slipstream.backend.commands import manage
from slipstream.backend.commands.check import read_recipe
from slipstream.backend.commands.frozen import seeds_of
from slipstream.backend.commands.submit import batch_script
from slipstream.backend.driver.start.job import SUBMITTED
from slipstream.backend.driver.start.run_folder import start_folder
from slipstream.configs.load import load_recipe, load_site, site_file
from slipstream.configs.rules.inputs import NO_INPUTS
from slipstream.configs.schema import RunConfig
from slipstream.configs.violations import RecipeError
from tests.unit.test_driver_run_folder import Silent, config, live
from tests.unit.test_rollout_gpu_environment import VALID

__all__ = ["config"]

SITE: dict[str, object] = {
    "account": "proj",
    "partition": "big,small",
    "qos": "long",
    "gres": "gpu:h100",
    "gpus_per_node": 4,
    "modules": ["cuda/12.8", "gcc"],
    "network_interface": "ib0,ib1",
    "node_disk": "/scratch",
    "restarts": 2,
    "container": {"runtime": "pyxis", "image": "/images/s.sqsh"},
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to submit from, with a recipe, a site file and an sbatch that repeats its arguments."""
    monkeypatch.chdir(tmp_path)
    reward = "slipstream.rollout.reward.FinalAnswer"
    content = {**VALID, "rollout": {**VALID["rollout"], "reward": reward}, "prepare": NO_INPUTS}
    (tmp_path / "recipe.yaml").write_text(json.dumps(content))
    (tmp_path / "site.yaml").write_text(yaml.safe_dump(SITE))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/sbatch").write_text('#!/bin/sh\n[ ! -e refuse ] || exit 1\necho "$@"\n')
    (tmp_path / "bin/sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}")
    return tmp_path


def submit(*arguments: str, site: str = "site.yaml") -> Result:
    return CliRunner(env={"SLIPSTREAM_SITE": site}).invoke(app, ["submit", "recipe.yaml", *arguments])


WRONG: list[tuple[str, str]] = [
    ("acount: proj", "acount = 'proj': unknown key; did you mean account?"),
    ("account: two words", "account = 'two words': expected one name"),
    ("account: --qos=high", "account = '--qos=high': expected one name"),
    ("account: ''", "account = '': expected one name"),
    ("partition: big, small", "partition = 'big, small': expected a name, or several with commas"),
    ("partition: [big]", "partition = ['big']: expected"),
    ("partition: 7", "partition = 7: expected"),
    ("qos: a,b", "qos = 'a,b': expected one name"),
    ("gpus_per_node: 0", "gpus_per_node = 0: expected at least 1"),
    ("gpus_per_node: '8'", "gpus_per_node = '8': expected"),
    ("gres: gpu:8", "gres = 'gpu:8': expected a name such as"),
    ("gres: gpu:h100:8", "gres = 'gpu:h100:8': expected a name such as"),
    ("modules: cuda", "modules = 'cuda': expected a list of texts"),
    ("container: {runtime: pyxis, image: i, mounts: a}", "container.mounts = 'a': expected a list of texts"),
    ("modules: [cuda, '; rm -r x']", "expected names of modules, such as `cuda/12.8`, and found '; rm -r x'"),
    ("network_interface: ib 0", "network_interface = 'ib 0': expected the name of an interface"),
    (
        "network_interface: a_name_too_long_",
        "network_interface = 'a_name_too_long_': expected the name",
    ),
    ("node_disk: scratch", "node_disk = 'scratch': expected an absolute path of at"),
    (
        "node_disk: /local/scratch/job",
        "node_disk = '/local/scratch/job': expected an absolute path of at",
    ),
    ("restarts: -1", "restarts = -1: expected at least 0"),
    (
        "container: {runtime: docker, image: x}",
        "container.runtime = 'docker': expected 'apptainer' or",
    ),
    ("container: image.sif", "container = 'image.sif': expected"),
    ("trainer_nodes: 2", "trainer_nodes = 2: unknown key"),
    ("type: slurm", "type = 'slurm': unknown key"),
    ("account: a\naccount: b", "account: given twice"),
    ("- account", "expected a mapping with partition, account and so on"),
    ("", "the file is empty"),
    ("account: [", "not valid YAML"),
]


@pytest.mark.parametrize(("text", "reason"), WRONG)
def test_a_wrong_site_file_is_refused_beside_everything_else(place: Path, text: str, reason: str):
    (place / "site.yaml").write_text(text + "\n")
    ended = submit("run.stepz=3", "--time", "1h", "--print")
    assert ended.exit_code == 2, ended.output
    assert reason in ended.output
    assert "run.stepz" in ended.output and "--time: '1h' found" in ended.output
    in_recipe = submit("--print", site="site.yaml")
    assert in_recipe.exit_code == 2, "the site alone is reason enough"


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        (["cluster.account=-x", "cluster.qos=a b"], 2),
        (["cluster.gres=gpu:8", "cluster.node_disk=here", "cluster.modules=[a b]"], 3),
        (["cluster.network_interface=''", "cluster.restarts=many", "cluster.partitions=big"], 3),
    ],
)
def test_a_recipe_is_held_to_the_same_rules(place: Path, settings: list[str], count: int):
    ended = submit("--print", *settings)
    assert ended.exit_code == 2 and f"{count} violation" in ended.output, ended.output


def test_a_site_file_that_is_named_must_be_there(place: Path):
    ended = submit("--print", site="no/such.yaml")
    assert ended.exit_code == 2 and "no/such.yaml: the site file cannot be read: No such file" in ended.output


def test_the_file_of_the_user_is_read_unless_another_one_or_none_is_named(tmp_path: Path):
    own = tmp_path / ".config/slipstream/site.yaml"
    assert site_file({"HOME": str(tmp_path)}) is None
    own.parent.mkdir(parents=True)
    own.write_text("qos: long\n")
    assert site_file({"HOME": str(tmp_path)}) == own
    assert site_file({"HOME": "/nobody", "XDG_CONFIG_HOME": str(tmp_path / ".config")}) == own
    assert site_file({"HOME": str(tmp_path), "SLIPSTREAM_SITE": "/site.yaml"}) == Path("/site.yaml")
    assert site_file({"HOME": str(tmp_path), "SLIPSTREAM_SITE": ""}) is None
    assert load_site(own) == {"qos": "long"}


def test_the_job_is_what_the_site_wants_and_the_print_says_where_it_comes_from(place: Path):
    recipe = json.loads((place / "recipe.yaml").read_text())
    recipe["cluster"] = {"account": "mine"}
    (place / "recipe.yaml").write_text(json.dumps(recipe))
    ended = submit("--print", "cluster.partition=tiny")
    assert ended.exit_code == 0, ended.output
    *comments, line = ended.stdout.strip().splitlines()
    assert '# cluster.account: "mine" (recipe.yaml)' in comments
    assert '# cluster.partition: "tiny" (the command line)' in comments
    assert '# cluster.gres: "gpu:h100" (site.yaml)' in comments
    words = shlex.split(line)
    given = dict(word.split("=", 1) for word in words[: words.index("sbatch")] if "=" in word)
    assert given["SLIPSTREAM_CONTAINER_IMAGE"] == "/images/s.sqsh"
    assert given["SLIPSTREAM_MODULES"] == "cuda/12.8 gcc"
    assert (given["NCCL_SOCKET_IFNAME"], given["GLOO_SOCKET_IFNAME"]) == ("=ib0,ib1", "ib0,ib1")
    assert (given["SLIPSTREAM_TMP"], given["SLIPSTREAM_RESTARTS"]) == ("/scratch", "2")
    options = words[words.index("sbatch") + 1 : words.index(str(batch_script()))]
    assert options == ["--nodes=1", "--gres=gpu:h100:2", "--account=mine", "--partition=tiny", "--qos=long"]
    # What the job reads is complete: the site file need not be on its node.
    arguments = words[words.index("recipe.yaml") + 1 :]
    config = load_recipe(place / "recipe.yaml", [*arguments, "cluster.type=slurm"])
    assert config.cluster.type == "slurm" and config.cluster.container is not None
    assert (config.cluster.account, config.cluster.partition) == ("mine", "tiny")


def test_a_job_reads_the_recipe_as_it_was_when_it_was_submitted(place: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("HF_TOKEN", "secret")
    ended = submit("--resume", "run.steps=3", "run.root=out", "actor.optimizer.lr=1e-5")
    assert ended.exit_code == 0, ended.output
    (frozen,) = (place / "out").glob(f"*/{SUBMITTED}/*")
    assert ended.stdout.split()[-2:] == [str((frozen / "recipe.yaml").relative_to(place)), "--resume"]
    (place / "recipe.yaml").write_text("changed")
    (place / "site.yaml").write_text("changed")
    config = load_recipe(frozen / "recipe.yaml")
    assert (config.run.steps, config.actor.optimizer.lr) == (3, 1e-5)
    assert config.cluster.type == "slurm" and config.cluster.qos == "long"
    facts = json.loads((frozen / "submission.json").read_text())
    assert facts["overrides"] == ["run.steps=3", "run.root=out", "actor.optimizer.lr=1e-5"]
    assert facts["cluster"]["cluster.qos"] == "site.yaml"
    assert facts["variables"]["NCCL_DEBUG"] == "INFO" and "secret" not in json.dumps(facts)
    assert facts["packages"]["pydantic"] and facts["directory"] == str(place)
    lines: list[str] = []
    manage.status(str(frozen.parents[1]), lines.append)
    assert "it has never had a driver" in lines[0]


def test_a_plan_estimates_with_the_machines_of_the_site(place: Path, monkeypatch: pytest.MonkeyPatch):
    (place / "site.yaml").write_text("{gpu_memory_gib: 40, file_system_bytes_per_s: 2.0e+10, account: mine}")
    monkeypatch.setenv("SLIPSTREAM_SITE", "site.yaml")
    for cluster in ([], ["cluster.type=local"], ["cluster.type=slurm"]):
        given = read_recipe("recipe.yaml", cluster).cluster
        assert (given.gpu_memory_gib, given.file_system_bytes_per_s) == (40, 2e10)
    given = read_recipe("recipe.yaml", ["cluster.type=slurm", "cluster.gpu_memory_gib=80"]).cluster
    assert given.gpu_memory_gib == 80
    (place / "site.yaml").write_text("gpu_memory: 40")
    with pytest.raises(RecipeError, match="gpu_memory"):
        read_recipe("recipe.yaml", [])


def test_a_job_of_another_kind_of_cluster_is_refused(place: Path):
    ended = submit("--print", "cluster.type=ray", "--time", "1h")
    assert ended.exit_code == 2 and "cluster.type=ray: a job of Slurm has" in ended.output, ended.output
    assert "--time: '1h'" in ended.output
    assert submit("--print", "cluster.type=slurm").exit_code == 0


def test_two_submissions_of_a_run_are_kept_apart_and_each_seed_has_its_own(place: Path):
    for _ in range(2):
        assert submit("--array", "0-2:2,7%1", "run.root=out").exit_code == 0
    name = VALID["run"]["name"]
    found = sorted(path.parent.parent.name for path in (place / "out").glob(f"*/{SUBMITTED}/*"))
    assert found == [f"{name}-seed{seed}" for seed in (0, 0, 2, 2, 7, 7)]
    ended = submit("--array", "1", "run.root=out")
    recipe, own_name, seed = ended.stdout.split()[-3:]
    assert recipe.startswith(f"out/{name}-seed%a/{SUBMITTED}/")
    assert (own_name, seed) == (f"run.name={name}-seed%a", "run.seed=%a")
    assert (place / recipe.replace("%a", "1")).is_file()


def test_seeds_are_counted_as_sbatch_counts_them():
    assert list(seeds_of("0-9:3,12,3-6:3%4")) == [0, 3, 6, 9, 12]


def test_what_sbatch_refuses_leaves_nothing_behind(place: Path):
    (place / "refuse").touch()
    ended = submit("run.root=out")
    assert ended.exit_code == 1 and "sbatch refused the job" in ended.output
    assert list((place / "out").iterdir()) == []


def test_a_run_begins_in_the_folder_of_its_submission_and_keeps_it_when_the_earlier_run_is_deleted(
    config: RunConfig,
):
    frozen = config.run.folder / SUBMITTED / "now/recipe.yaml"
    frozen.parent.mkdir(parents=True)
    frozen.write_text("{}")
    live(config)
    with pytest.raises(Exception, match="holds an earlier run"):
        live(config)
    (config.run.folder / "mine").touch()
    live(config, overwrite=True)
    assert frozen.read_text() == "{}" and not (config.run.folder / "mine").exists()

    async def start_over() -> None:
        (await start_folder(config, Silent(), "set aside")).release()  # type: ignore[arg-type]

    asyncio.run(start_over())
    assert frozen.read_text() == "{}"


@pytest.mark.parametrize(
    ("setup", "code", "words"),
    [
        ('module() { echo "$*"; }', 0, "load cuda/12.8\nload gcc\n"),
        ("module() { [[ $2 == gcc ]]; }", 2, "`module load cuda/12.8` fails on node1"),
        ("type() { return 1; }", 2, "no command `module` on node1"),
    ],
)
def test_the_batch_script_loads_the_modules_of_the_site_or_says_why_not(setup: str, code: int, words: str):
    script = batch_script().read_text()
    begin = script.index("if [[ -n ${SLIPSTREAM_MODULES:-} ]]")
    part = script[begin : script.index("\nfi\n", begin) + 4]
    ended = subprocess.run(
        ["bash", "-uc", 'fail() { echo "$*"; exit 2; }\n' + setup + "\n" + part],
        env={"PATH": "/usr/bin:/bin", "SLURMD_NODENAME": "node1", "SLIPSTREAM_MODULES": "cuda/12.8 gcc"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == code and words in ended.stdout, ended
