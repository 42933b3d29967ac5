"""A recipe as a Slurm job: its nodes, its container, its time."""

import contextlib
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from slipstream.backend.cli.app import app
from slipstream.backend.commands.outcome import Failed, WrongInput
from slipstream.backend.commands.submit import (
    JobOptions,
    batch_script,
    container_variables,
    nodes_needed,
    printed,
    sbatch_command,
    seconds,
    submit,
)
from slipstream.configs.rules.inputs import NO_INPUTS
from slipstream.configs.schema import ModelJudge, RunConfig
from slipstream.slurm import own_address
from tests.environment import ROOT, environment
from tests.unit.test_rollout_gpu_environment import VALID


def recipe(
    *,
    parallel: dict[str, object] | None = None,
    engine: dict[str, object] | None = None,
    run: dict[str, object] | None = None,
    **cluster: object,
) -> RunConfig:
    return RunConfig.model_validate(
        {
            **VALID,
            "run": {**VALID["run"], **(run or {})},
            "actor": {"parallel": parallel or {}},
            "rollout": {**VALID["rollout"], "engine": engine or {}},
            "cluster": {"type": "slurm", **cluster},
        }
    )


@pytest.mark.parametrize(
    ("parallel", "engine", "cluster", "nodes"),
    [
        ({"tensor": 4}, {"count": 2, "tensor_parallel": 2}, {}, 1),
        ({"tensor": 4}, {"count": 2, "tensor_parallel": 2}, {"trainer_nodes": 1}, 2),
        ({"tensor": 4}, {"count": 5}, {}, 2),
        ({"tensor": 8}, {"count": 8}, {}, 2),
        ({"tensor": 4}, {"count": 2, "tensor_parallel": 8}, {}, 3),
        ({"tensor": 8, "data": 2}, {"count": 3, "tensor_parallel": 4}, {"trainer_nodes": 2}, 4),
        ({"tensor": 8, "data": 2}, {"count": 3, "tensor_parallel": 3}, {"trainer_nodes": 3}, 5),
        ({"tensor": 8, "data": 2}, {"count": 16, "colocated": True}, {}, 2),
        ({"tensor": 8}, {"count": 2, "tensor_parallel": 16, "nodes": 2}, {}, 5),
        ({"tensor": 8}, {"count": 3, "tensor_parallel": 8, "nodes": 2}, {}, 5),
        ({"tensor": 8, "data": 2}, {"tensor_parallel": 16, "nodes": 2, "colocated": True}, {}, 2),
    ],
)
def test_a_job_has_the_nodes_that_trainer_and_engines_need(parallel, engine, cluster, nodes):
    assert nodes_needed(recipe(parallel=parallel, engine=engine, **cluster), "train", 8) == nodes


@pytest.mark.parametrize(
    ("ranks", "engine", "judge", "nodes"),
    [
        (8, {"count": 6}, {"count": 2}, 2),
        (8, {"count": 6}, {"count": 3}, 3),
        (8, {"count": 6}, {"tensor_parallel": 4}, 3),
        (8, {"count": 2, "tensor_parallel": 4}, {"count": 3, "tensor_parallel": 4}, 4),
        (4, {"count": 4, "colocated": True}, {"tensor_parallel": 4}, 1),
        (8, {"count": 8, "colocated": True}, {"tensor_parallel": 4}, 2),
    ],
)
def test_the_judges_own_engines_have_gpus_that_are_left_or_further_nodes(ranks, engine, judge, nodes):
    config = recipe(parallel={"tensor": ranks}, engine=engine)
    endpoint = {"type": "engines", "path": "judge", **judge}
    section = ModelJudge.model_validate({"endpoint": endpoint})
    assert nodes_needed(config.model_copy(update={"judge": section}), "train", 8) == nodes


@pytest.mark.parametrize(
    ("verb", "engine", "cluster", "nodes"),
    [
        ("train", {"count": 3}, {}, 1),
        ("train", {"count": 3}, {"trainer_nodes": 1}, 2),
        ("train", {"count": 3}, {"trainer_nodes": 2}, 3),
        ("train", {"count": 2, "tensor_parallel": 4, "nodes": 2}, {}, 3),
        ("train", {"colocated": True}, {}, 1),
        ("sft", {"count": 3}, {}, 1),
    ],
)
def test_without_gpus_engines_share_the_nodes_after_the_trainers(verb, engine, cluster, nodes):
    config = recipe(engine=engine, device="cpu", **cluster)
    assert nodes_needed(config, verb, 0) == nodes
    command, _ = sbatch_command(config, verb, ["my.yaml"], JobOptions())
    assert command[1:3] == [f"--nodes={nodes}", str(batch_script())]


def test_supervised_training_has_no_engines():
    assert nodes_needed(recipe(parallel={"tensor": 8, "data": 2}, engine={"count": 8}), "sft", 8) == 2


@pytest.mark.parametrize(
    ("parallel", "engine", "cluster", "gpus", "reason"),
    [
        ({"data": 16}, {}, {}, 8, "cluster.trainer_nodes"),
        ({"data": 16}, {}, {"trainer_nodes": 1}, 8, "cluster.trainer_nodes"),
        ({}, {"tensor_parallel": 8}, {}, 4, r"rollout.engine.tensor_parallel.*rollout.engine.nodes to .* 2$"),
        ({}, {"tensor_parallel": 32, "nodes": 2}, {}, 8, r"rollout.engine.tensor_parallel.*2 nodes.* 4$"),
        ({"tensor": 8}, {"tensor_parallel": 8, "nodes": 2, "colocated": True}, {}, 8, "rollout.engine.nodes"),
    ],
)
def test_a_job_that_could_not_hold_the_recipe_is_refused(parallel, engine, cluster, gpus, reason):
    with pytest.raises(WrongInput, match=f"^{reason}"):
        nodes_needed(recipe(parallel=parallel, engine=engine, **cluster), "train", gpus)


@pytest.mark.parametrize(
    ("time", "expected"),
    [
        ("90", 5400),
        ("1:30", 90),
        ("8:00:00", 28800),
        ("3-12", 302400),
        ("1-2:30", 95400),
        ("1-0:0:5", 86405),
        ("UNLIMITED", None),
        ("0", None),
        ("0-0:0", None),
    ],
)
def test_time_limits_are_read_as_sbatch_reads_them(time, expected):
    assert seconds(time) == expected


@pytest.mark.parametrize("time", ["", "1h", "1-", "1:2:3:4"])
def test_what_is_no_time_limit_is_refused(time):
    with pytest.raises(WrongInput, match="--time"):
        seconds(time)


def test_a_time_limit_in_which_nothing_can_be_trained_is_refused():
    options = JobOptions(nodes=2, gpus_per_node=8, time="3:59", sbatch=[])
    with pytest.raises(WrongInput, match=r"--time: 3:59 is 239 s, 240 s or more expected"):
        sbatch_command(recipe(), "train", ["my.yaml"], options)
    command, _ = sbatch_command(recipe(), "train", ["my.yaml"], replace(options, time="4"))
    assert "--time=4" in command


def test_the_command_is_sbatch_with_the_batch_script():
    options = JobOptions(nodes=None, gpus_per_node=8, time="3-00", sbatch=["--partition=big"])
    command, variables = sbatch_command(recipe(), "sft", ["my.yaml", "--resume", "run.steps=2"], options)
    script = str(batch_script())
    assert command == [
        *["sbatch", "--nodes=1", "--gpus-per-node=8", "--time=3-00", "--partition=big", script],
        *["sft", "my.yaml", "--resume", "run.steps=2"],
    ]
    assert variables == {}
    assert shlex.split(printed(command, variables)) == command


def test_the_container_shows_the_folders_that_the_recipe_names(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "data"))
    for name in ("models/policy", "adapters/first", "data", "runs"):
        (tmp_path / name).mkdir(parents=True)
    config = RunConfig.model_validate(
        {
            **VALID,
            "run": {**VALID["run"], "root": str(tmp_path / "runs")},
            "model": {"path": str(tmp_path / "models/policy")},
            "checkpoint": {"local_dir": "/scratch of nodes"},
            "data": {"path": str(tmp_path / "data/prompts.jsonl")},
            "actor": {"lora": {"rank": 1, "alpha": 1, "path": str(tmp_path / "adapters/first")}},
            "cluster": {
                "type": "slurm",
                "container": {"runtime": "pyxis", "image": "/images/a b.sqsh", "mounts": ["/x:/y", "/z"]},
            },
        }
    )
    variables = container_variables(config)
    assert variables["SLIPSTREAM_CONTAINER"] == "pyxis"
    assert variables["SLIPSTREAM_CONTAINER_IMAGE"] == "/images/a b.sqsh"
    places = [tmp_path / name for name in ("runs", "data", "models/policy", "adapters/first")]
    shown = [f"{folder}:{folder}" for folder in (*places, "/scratch of nodes")]
    assert variables["SLIPSTREAM_CONTAINER_MOUNTS"].split(",") == ["/x:/y", "/z:/z", *shown]
    of_hub = config.model_copy(update={"model": config.model.model_copy(update={"path": Path("hf://a/b")})})
    monkeypatch.setenv("HF_HOME", str(tmp_path / "models"))
    places = [tmp_path / name for name in ("runs", "data", "adapters/first", "models")]
    shown = [f"{folder}:{folder}" for folder in (*places, "/scratch of nodes")]
    assert container_variables(of_hub)["SLIPSTREAM_CONTAINER_MOUNTS"].split(",")[2:] == shown
    assert "SLIPSTREAM_CONTAINER=pyxis SLIPSTREAM_CONTAINER_IMAGE='" in printed(["sbatch"], variables)


def fake_sbatch(folder: Path, script: str) -> str:
    path = folder / "sbatch"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_a_submission_has_the_variables_of_its_container_and_no_others(tmp_path, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_CONTAINER_MOUNTS", "left over")
    sbatch = fake_sbatch(tmp_path, 'echo "$SLIPSTREAM_CONTAINER|$SLIPSTREAM_CONTAINER_MOUNTS|$*"')
    assert submit([sbatch, "a.sbatch"], {"SLIPSTREAM_CONTAINER": "pyxis"}) == "pyxis||a.sbatch"


@pytest.mark.parametrize("task", ["", "7"])
def test_a_task_of_an_array_reads_its_number_in_the_arguments(task):
    lines = batch_script().read_text().splitlines()
    first = next(n for n, line in enumerate(lines) if "SLURM_ARRAY_TASK_ID" in line)
    part = lines[first : lines.index("fi", first) + 1]
    ended = subprocess.run(
        [
            "bash",
            "-uc",
            "\n".join(["job=8", *part, 'printf "%s\\n" "$job" "$@"']),
            "bash",
            "run.name=a b-seed%a",
            "100%",
            "%a=%a",
        ],
        env={
            "PATH": "/usr/bin:/bin",
            **({"SLURM_ARRAY_TASK_ID": task, "SLURM_ARRAY_JOB_ID": "5"} if task else {}),
        },
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    number = task or "%a"
    job = "5_7" if task else "8"
    assert ended.stdout.splitlines() == [job, f"run.name=a b-seed{number}", "100%", f"{number}={number}"]


MODULE = """
module() {
    case $2 in
    fails) return 1 ;;
    silent) echo "ERROR: Unable to locate a modulefile for 'silent'" >&2 ;;
    *) LOADEDMODULES=${LOADEDMODULES:+$LOADEDMODULES:}$2${3:-} ;;
    esac
}
fail() { echo "$*" >&2; exit 2; }
say() { echo "$*"; }
"""


@pytest.mark.parametrize(
    ("modules", "code", "said"),
    [
        ("gcc/13 cuda/12.8", 0, ""),
        ("gcc/13 fails cuda/12.8", 2, "`module load fails` fails on n1"),
        ("gcc/13 silent", 0, "silent is not among the loaded modules: gcc/13"),
        ("silent", 0, "silent is not among the loaded modules: none"),
    ],
)
def test_a_module_that_is_not_loaded_is_named_whatever_the_exit_code(modules: str, code: int, said: str):
    script = batch_script().read_text()
    begin = script.index("# Every other node gets what they have set")
    part = script[begin : script.index("# Slurm does not set the end", begin)]
    ended = subprocess.run(
        ["bash", "-uo", "pipefail", "-c", MODULE + part],
        env={
            "PATH": "/usr/bin:/bin",
            "SLIPSTREAM_MODULES": modules,
            "SLURMD_NODENAME": "n1",
            "LOADEDMODULES": "",
        },
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ended.returncode == code, ended.stderr
    assert said in ended.stderr
    assert ("loaded modules" in ended.stderr) == ("loaded modules" in said)


def test_an_array_has_a_run_for_each_seed_and_begins_after_another_job():
    options = JobOptions(seeds="0-3%2", after="1234")
    command, _ = sbatch_command(recipe(parallel={"tensor": 8}), "train", ["my.yaml", "run.steps=2"], options)
    assert command[3:5] == ["--dependency=afterany:1234", "--array=0-3%2"]
    name = VALID["run"]["name"]
    assert command[6:] == ["my.yaml", "run.steps=2", f"run.name={name}-seed%a", "run.seed=%a"]


WRONG_OPTIONS = [
    (JobOptions(time="soon"), ["--time: 'soon' found"]),
    (JobOptions(time="1:30"), ["--time: 1:30 is 90 s"]),
    (JobOptions(seeds="a-b"), ["--array: 'a-b' found"]),
    (JobOptions(seeds="1,"), ["--array: '1,' found"]),
    (JobOptions(seeds=""), ["--array: '' found"]),
    (JobOptions(seeds="0-99999999"), ["--array: '0-99999999' found, at most 10,000"]),
    (JobOptions(seeds="0-4:0"), ["--array: '0-4:0' found"]),
    (JobOptions(seeds="0-4%0"), ["--array: '0-4%0' found"]),
    (JobOptions(after="7", sbatch=["-d", "singleton"]), ["--after: --sbatch=--dependency found as well"]),
    (JobOptions(after="my-job"), ["--after: 'my-job' found"]),
    (JobOptions(after="12,13"), ["--after: '12,13' found"]),
    (JobOptions(nodes=1), ["--nodes: 1 found, 2 or more"]),
    (JobOptions(gpus_per_node=0), ["--gpus-per-node: 0 found"]),
    (JobOptions(gpus_per_node=4), ["rollout.engine.tensor_parallel: ", "cluster.trainer_nodes: "]),
    (
        JobOptions(nodes=1, gpus_per_node=4, time="90 s", seeds="x", after="y"),
        ["--time", "--array", "--after", "rollout.engine.tensor_parallel", "cluster.trainer_nodes"],
    ),
]


@pytest.mark.parametrize(("options", "reasons"), WRONG_OPTIONS)
def test_a_job_is_refused_with_every_reason_at_once(options, reasons):
    config = recipe(parallel={"tensor": 8}, engine={"tensor_parallel": 8}, device="gpu")
    with pytest.raises(WrongInput) as error:
        sbatch_command(config, "train", ["my.yaml"], options)
    lines = str(error.value).splitlines()
    assert len(lines) == len(reasons)
    assert all(line.startswith(reason) for line, reason in zip(lines, reasons, strict=True)), lines


WRONG_FOR_SBATCH = {
    "--gres=gpu:h100:8": "use --gpus-per-node, cluster.gpus_per_node or cluster.gres",
    "--gpus-per-node=h100:8": "use --gpus-per-node",
    "-G8": "use --gpus-per-node",
    "--gpus-per-task=8": "use --gpus-per-node",
    "-N3": "use --nodes",
    "--nodes=3-5": "use --nodes",
    "--time=10": "use --time",
    "--array=0-3": "would all drive the same run",
    "--ntasks-per-node=8": "one Ray on each node",
    "-n64": "one Ray on each node",
    "--export=NONE": "--export=ALL,NAME=VALUE",
    "--export=PATH": "--export=ALL,NAME=VALUE",
    "--signal=TERM@120": "--signal=B:USR1@SECONDS",
    "--signal=USR1@120": "--signal=B:USR1@SECONDS",
    "--container-image=/images/a.sqsh": "use cluster.container",
    "--wait": "slipstream status",
    "--test-only": "use --print",
    "--wrap=hostname": "a script already",
    ":": "heterogeneous",
    "partition=big": "an option expected",
    "--partition=big --qos=high": "an --sbatch of its own",
    "--gres=nvme:1": "the last --gres alone",
    "--gpus-per-n=8": "use --gpus-per-node",
    "--arra=0-3": "would all drive the same run",
    "-vN4": "use --nodes",
    "--nodes 4": "use --nodes",
    "-p gpu": "--sbatch=-pgpu expected",
    "-p=gpu": "--sbatch=-pgpu expected",
    "--reservation tuesday": "--sbatch=--reservation=tuesday expected",
    "-x": "a value expected",
    "--reservation": "a value expected",
    "--mem-per-cpu=4G": "use --mem=SIZE",
    "--chdir=/tmp": "call submit in that folder",
    "-Mother": "set SLURM_CLUSTERS",
    "--export-file=/tmp/a": "--export=ALL,NAME=VALUE",
    "--uid=nobody": "submit as that user",
    "--help": "it submits nothing",
    "-V": "it submits nothing",
    "--gpu-bind=single:1": "one Ray on each node",
    "--tres-per-task=gres/gpu:8": "one Ray on each node",
    "--no-container-mount-home": "use cluster.container",
    "--": "an option expected",
    "-qlow": "--sbatch=--qos=high found as well",
    "--output=no/such/%j.out": "no folder no/such, which sbatch does not make",
    "-eno/such.err": "no folder no, which sbatch does not make",
}
RIGHT_FOR_SBATCH = [
    "-p",
    "big",
    "--constraint=[rack1|rack2]&ib",
    "--exclusive=user",
    "--mem=500G",
    "--comment=a -b c",
    "-Jmy job",
    "-Hv",
    "--qos=high",
    "--reservation=tuesday",
    "--output=%A_%a.out",
    "--error=/of/nodes/%j.err",
    "--hint=nomultithread",
    "--nodelist=n[1-4,7]",
    "-x",
    "n[1-2]",
    "--no-requeue",
    "--signal=B:USR1@600",
    "--export=ALL,A=b",
    "--dependency",
    "singleton",
    "--begin=now+1hour",
    "--licenses=x:1",
    "--switches=1",
    "--cpus-per-task=96",
]


@pytest.mark.parametrize("option", WRONG_FOR_SBATCH)
def test_an_option_of_sbatch_that_would_break_the_job_is_refused_with_the_way_that_works(option):
    config = recipe(gres="gpu:h100") if "nvme" in option else recipe()
    options = JobOptions(sbatch=["--qos=high", option, "--partition=big"])
    with pytest.raises(WrongInput) as error:
        sbatch_command(config, "train", ["my.yaml"], options)
    [line] = str(error.value).splitlines()
    assert option in line
    assert WRONG_FOR_SBATCH[option] in line


@pytest.mark.parametrize("words", [["--exclusive", "user"], ["--no-requeue", "job.sh"], ["-pbig", "job.sh"]])
def test_a_word_that_sbatch_would_take_for_the_script_is_refused(words: list[str]):
    with pytest.raises(WrongInput, match=f"'{words[1]}' found, an option expected"):
        sbatch_command(recipe(), "train", ["my.yaml"], JobOptions(sbatch=words))


def test_an_option_without_its_value_takes_no_other_option_for_it():
    with pytest.raises(WrongInput, match="'-p' found, a value expected"):
        sbatch_command(recipe(), "train", ["my.yaml"], JobOptions(sbatch=["-p", "--qos=high"]))


def test_what_sites_commonly_want_of_sbatch_is_handed_on_as_it_is():
    command, _ = sbatch_command(recipe(), "train", ["my.yaml"], JobOptions(sbatch=RIGHT_FOR_SBATCH))
    assert command[3 : 3 + len(RIGHT_FOR_SBATCH)] == RIGHT_FOR_SBATCH


def test_a_submission_within_a_job_hands_on_nothing_of_that_job(monkeypatch, tmp_path):
    for name in ("SLURM_MEM_PER_CPU", "SLURM_NTASKS_PER_NODE", "SLURM_CPU_BIND", "SLURM_EXPORT_ENV"):
        monkeypatch.setenv(name, "of the job around it")
    for name in ("SBATCH_EXPORT", "SBATCH_WAIT", "SBATCH_ARRAY_INX"):
        monkeypatch.setenv(name, "NONE")
    breaking = {
        "GPUS": "8",
        "GRES": "gpu:8",
        "SIGNAL": "TERM@120",
        "CONTAINER": "/image",
        "MEM_PER_CPU": "4G",
    }
    for name, value in breaking.items():
        monkeypatch.setenv(f"SBATCH_{name}", value)
    kept = {
        "SBATCH_ACCOUNT": "mine",
        "SBATCH_GRES_FLAGS": "disable-binding",
        "SBATCH_WCKEY": "two\nlines",
        "SLURM_CLUSTERS": "other",
        "SLURM_CONF": "/etc/slurm/other.conf",
    }
    for name, value in kept.items():
        monkeypatch.setenv(name, value)
    of_slurm = "env | grep -E '^S(LURM|BATCH)_' | sort"
    sbatch = fake_sbatch(tmp_path, of_slurm)
    first_lines = [f"{name}={value.partition(chr(10))[0]}" for name, value in kept.items()]
    assert submit([sbatch], {}).splitlines() == first_lines
    line = printed([sbatch, "--account=ours"], {})
    assert "# SBATCH_ACCOUNT=mine is replaced by --account" in line
    assert "# SBATCH_GPUS=8 is left out: " in line
    assert "# SBATCH_GRES_FLAGS=disable-binding has its effect (--gres-flags)" in line
    ended = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=240, check=True)
    assert ended.stdout == submit([sbatch], {}) + "\n", "who copies the line submits the same job"


def test_a_job_that_would_go_to_another_cluster_than_status_asks_is_refused(monkeypatch):
    monkeypatch.setenv("SBATCH_CLUSTERS", "other")
    with pytest.raises(WrongInput, match=r"SBATCH_CLUSTERS=other: .*set SLURM_CLUSTERS"):
        sbatch_command(recipe(), "train", ["my.yaml"], JobOptions())


def test_the_time_limit_of_the_shell_is_checked_as_one_of_the_command_line(monkeypatch):
    monkeypatch.setenv("SBATCH_TIMELIMIT", "3")
    ended = call("quickstart", "--print")
    assert ended.exit_code == 2 and "--time: 3 is 180 s" in ended.output
    assert " --time=1-00 " in call("quickstart", "--print", "--time", "1-00").output
    monkeypatch.setenv("SBATCH_TIMELIMIT", "90")
    assert " --time=90 " in call("quickstart", "--print", f"prepare={NO_INPUTS}").output


def test_warnings_of_sbatch_are_told_in_any_encoding(tmp_path):
    sbatch = fake_sbatch(tmp_path, "printf 'ger\\344t: only 2 nodes\\n' >&2; echo Submitted batch job 7")
    assert submit([sbatch], {}) == "ger\N{REPLACEMENT CHARACTER}t: only 2 nodes\nSubmitted batch job 7"


def test_options_of_sbatch_replace_those_of_the_site():
    options = JobOptions(sbatch=["-ptiny", "--account", "mine"])
    command, _ = sbatch_command(recipe(partition="big", account="proj", qos="q"), "train", ["a"], options)
    assert command[3:-2] == ["--qos=q", "-ptiny", "--account", "mine"]


def test_where_slurm_counts_no_gpus_a_job_asks_for_none_and_ray_is_told_their_number(monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_GPUS_PER_NODE", "5")
    config = recipe(parallel={"tensor": 8}, engine={"count": 8}, gres="none", gpus_per_node=8)
    command, variables = sbatch_command(config, "train", ["a"], JobOptions())
    assert command[1:3] == ["--nodes=2", str(batch_script())]
    assert variables == {"SLIPSTREAM_GPUS_PER_NODE": "8"}
    assert "SLIPSTREAM_GPUS_PER_NODE=8" in printed(command, variables)
    assert "-u SLIPSTREAM_GPUS_PER_NODE" in printed(command, {})
    script = (batch_script().parent / "ray_node.sh").read_text()
    [line] = [line for line in script.splitlines() if line.startswith("gpus=")]
    for given, gpus in (
        ({"SLIPSTREAM_GPUS_PER_NODE": "8"}, "8"),
        ({"SLURM_GPUS_ON_NODE": "4"}, "4"),
        ({}, "0"),
    ):
        said = subprocess.check_output(
            ["bash", "-uc", f'{line}\necho "$gpus"'], env=given, text=True, timeout=240
        )
        assert said.strip() == gpus


@pytest.mark.parametrize("name", ["a,b", "a:b"])
def test_a_folder_that_no_container_can_show_is_refused(tmp_path, monkeypatch, name):
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / name)
    container = {"runtime": "apptainer", "image": "/s.sif"}
    with pytest.raises(WrongInput, match=r"cluster\.container: .*, a folder without"):
        sbatch_command(recipe(container=container), "train", ["a"], JobOptions())


def test_the_batch_script_takes_no_sizes_of_tasks_and_no_filters_from_the_shell():
    script = batch_script().read_text()
    begin = script.index("unset ")
    part = script[begin : script.index("\n\n", begin)]
    wanted = {"SLURM_JOB_ID": "7", "SLURM_GPUS_PER_NODE": "8", "SLURM_CONF": "/etc/slurm.conf"}
    names = (
        "SRUN_DEBUG SQUEUE_STATES SCANCEL_INTERACTIVE SLURM_CLUSTERS SLURM_TIME_FORMAT SLURM_CPUS_PER_TASK"
    )
    for given in (dict.fromkeys(names.split(), "1"), {}):
        said = subprocess.check_output(
            ["bash", "-uc", f"{part}\n/usr/bin/env | /bin/grep -E '^(SLURM|SRUN|SQ|SC)' | /usr/bin/sort"],
            env={**given, **wanted},
            text=True,
            timeout=240,
        )
        assert said.split() == sorted(f"{name}={value}" for name, value in wanted.items())


def test_a_node_notices_the_end_of_its_job_behind_a_head_that_answers_nothing(monkeypatch):
    monkeypatch.setattr(own_address, "CONNECT_S", 0.05)
    end, other_end = os.pipe()
    os.close(other_end)
    with (
        socket.socket() as silent,
        contextlib.ExitStack() as connections,
        os.fdopen(end, "rb", 0) as lifeline,
    ):
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)
        for _ in range(2):  # until nobody is answered any more
            waiting = connections.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(silent.getsockname())
        with pytest.raises(TimeoutError, match=r"the job ended before 127\.0\.0\.1"):
            own_address.await_port("127.0.0.1", silent.getsockname()[1], 1e6, lifeline)


@pytest.mark.parametrize(
    ("folder", "programs", "said"),
    [
        ("no such", "", "n1 does not see that folder: submit from one that all nodes share"),
        ("", "mkdir", "no srun on the PATH of n1"),
        ("", "mkdir srun scontrol scancel", "no squeue on the PATH of n1"),
    ],
)
def test_what_a_node_lacks_is_named_before_anything_starts(tmp_path: Path, folder, programs, said):
    (tmp_path / "bin").mkdir()
    for name in programs.split():
        (tmp_path / "bin" / name).symlink_to("/bin/mkdir")
    ended = subprocess.run(
        ["/bin/bash", str(batch_script()), "my.yaml"],
        env={"PATH": str(tmp_path / "bin"), "SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1"}
        | {"SLURM_SUBMIT_DIR": str(tmp_path / folder)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ended.returncode == 2 and said in ended.stderr, ended.stderr


@pytest.mark.parametrize("program", ["apptainer", "singularity", "neither"])
def test_apptainer_runs_under_either_name_also_where_nodes_have_no_home(tmp_path: Path, program: str):
    Path(fake_sbatch(tmp_path, "")).rename(tmp_path / program)
    script = batch_script().read_text()
    begin = script.index("case ${SLIPSTREAM_CONTAINER:-} in")
    part = script[begin : script.index("esac\n", begin) + 5]
    for home, shown in ((str(tmp_path), []), ("/no/home", ["--no-home"])):
        ended = subprocess.run(
            ["/bin/bash", "-uc", f'fail() {{ echo "$*"; exit 2; }}\n{part}\nprintf "%s\\n" "${{inside[@]}}"'],
            env={"PATH": str(tmp_path), "HOME": home, "PWD": "/", "SLIPSTREAM_CONTAINER": "apptainer"}
            | {"mounts": "/a b:/a b", "image": "/i.sif", "SLURMD_NODENAME": "n1"},
            capture_output=True,
            text=True,
            timeout=240,
        )
        words = [program, "exec", "--nv", "--pwd", os.getcwd(), "--bind", "/a b:/a b", *shown, "/i.sif"]
        expected = ["no apptainer on the PATH of n1, and no singularity"] if program == "neither" else words
        assert (ended.stdout.splitlines(), ended.stderr) == (expected, "")


@pytest.mark.parametrize("variable", ["LMOD_PKG", "MODULESHOME"])
def test_modules_are_found_where_the_site_keeps_them(tmp_path: Path, variable: str):
    (tmp_path / "a b/init").mkdir(parents=True)
    (tmp_path / "a b/init/bash").write_text(MODULE)
    script = batch_script().read_text()
    begin = script.index("if [[ -n ${SLIPSTREAM_MODULES:-} ]]")
    part = script[begin : script.index("\nfi\n", begin) + 4].replace("/etc/profile.d", "/nowhere")
    ended = subprocess.run(
        ["bash", "-uc", f'fail() {{ exit 3; }}\n{part}\necho "$LOADEDMODULES"'],
        env={"PATH": "/usr/bin:/bin", variable: str(tmp_path / "a b"), "SLIPSTREAM_MODULES": "gcc/13 cuda"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert (ended.stdout, ended.stderr) == ("gcc/13:cuda\n", "")


@pytest.mark.parametrize("given", ["RESTARTS=many", "RESTARTS=08", "NODES_TIMEOUT_S=5m", "OBJECT_STORE=2G"])
def test_a_setting_of_the_shell_that_is_no_number_is_named_before_ray_starts(given: str):
    script = batch_script().read_text()
    begin = script.index("for name in SLIPSTREAM_{")
    part = script[begin : script.index("done\n", begin) + 5]
    name, value = f"SLIPSTREAM_{given}".split("=")
    for number, found in (
        (value, f"{name}={value} found, a whole number expected\n"),
        ("8", "on\n"),
        ("", "on\n"),
    ):
        ended = subprocess.run(
            ["bash", "-uc", f'fail() {{ echo "$*"; exit 2; }}\n{part}\necho on'],
            env={name: number},
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert (ended.stdout, ended.stderr) == (found, "")


def test_a_node_disk_that_the_first_job_makes_is_open_to_the_jobs_of_others(tmp_path):
    script = (batch_script().parent / "ray_node.sh").read_text()
    begin = script.index("[[ -d $tmp_root ]]")
    part = script[begin : script.index("for left in", begin)]
    subprocess.run(
        ["bash", "-uc", f"umask 077\n{part}\nmkdir $tmp_root/own"],
        env={"PATH": "/usr/bin:/bin", "tmp_root": str(tmp_path / "a/b")},
        timeout=240,
        check=True,
    )
    modes = {name: (tmp_path / name).stat().st_mode & 0o7777 for name in ("a", "a/b", "a/b/own")}
    assert modes == {"a": 0o755, "a/b": 0o1777, "a/b/own": 0o700}


@pytest.mark.parametrize("gres", ["gpu", "gpu:h100", "gpu:1g.10gb", "gpu:3090", "gpu:a100_3g.20gb"])
def test_gpus_may_have_any_name_that_sites_give_them(gres):
    command, _ = sbatch_command(recipe(gres=gres), "train", ["my.yaml"], JobOptions(gpus_per_node=8))
    assert f"--gres={gres}:8" in command


@pytest.mark.parametrize("gres", ["gpu:8", "gpu:h100:8", "gpu:", ":h100", "gpu h100"])
def test_a_number_of_gpus_is_the_recipes(gres):
    with pytest.raises(ValueError, match="without a number"):
        recipe(gres=gres)


def test_what_sbatch_refuses_is_a_failure_with_its_words(tmp_path):
    with pytest.raises(Failed, match="invalid partition"):
        submit([fake_sbatch(tmp_path, "echo invalid partition >&2; exit 1")], {})


def test_without_slurm_the_command_can_still_be_seen(tmp_path):
    with pytest.raises(WrongInput, match="--print"):
        submit([str(tmp_path / "sbatch")], {})


@pytest.fixture(autouse=True)
def named_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever tests run, the batch script finds its environment."""
    monkeypatch.setenv("SLIPSTREAM_VENV", "/venv")


def test_a_job_has_the_environment_of_submit_where_the_batch_script_would_find_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "here"))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("SLIPSTREAM_VENV")
    (tmp_path / "here/bin").mkdir(parents=True)
    (tmp_path / "here/bin/ray").touch()
    own = {"SLIPSTREAM_VENV": str(tmp_path / "here")}

    def variables(container: object = None) -> dict[str, str]:
        return sbatch_command(recipe(container=container), "train", ["a"], JobOptions())[1]

    assert variables() == own
    container = {"runtime": "pyxis", "image": "/i"}
    assert "SLIPSTREAM_VENV" not in variables(container=container)
    (tmp_path / ".venv").symlink_to(tmp_path / "here")
    assert variables() == {}
    (tmp_path / ".venv").unlink()
    Path(fake_sbatch(tmp_path, "")).rename(tmp_path / "slipstream")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert variables() == {}, "the one on the PATH"


def call(*arguments: str) -> Result:
    return CliRunner(env={"SLIPSTREAM_SITE": ""}).invoke(app, ["submit", *arguments])


RECIPES = sorted(file.stem for file in (ROOT / "configs/recipes").glob("*.yaml"))
SUBMISSIONS = ROOT / "tests/unit/submissions.txt"


def test_the_submission_of_every_recipe_is_the_one_in_the_file():
    lines = [line for line in batch_script().read_text().splitlines() if line.startswith("#SBATCH")]
    absent = f"prepare={NO_INPUTS}"  # the models are not on this machine
    further = ["--resume", "--array", "0-2", "--after", "7", "--time", "1-00", "run.steps=9"]
    for name in RECIPES:
        kind = ["--sft"] if name.startswith("sft") else []
        for options in ([], further):
            ended = call(name, "--print", *kind, absent, *options)
            assert ended.exit_code == 0, ended.output
            line = ended.stdout.strip().splitlines()[-1].replace(str(batch_script()), "train.sbatch")
            lines.append(line.replace(f" {absent}", ""))
    text = "\n".join(lines) + "\n"
    if os.environ.get("UPDATE_PLANS"):
        SUBMISSIONS.write_text(text, encoding="utf-8")
    assert text == SUBMISSIONS.read_text(encoding="utf-8")


def test_a_recipe_takes_the_nodes_and_gpus_of_its_name():
    named = [
        line for line in SUBMISSIONS.read_text(encoding="utf-8").splitlines() if line.startswith("sbatch")
    ]
    checked = 0
    for line in named:
        nodes, gpus, *_ = [*re.findall(r"--(?:nodes|gpus-per-node)=(\d+)", line), "0"]
        if name := re.search(r"-(\d+)n(\d+)g-", line):
            assert (nodes, gpus) == name.groups(), line
            checked += 1
    assert checked > 20


@pytest.mark.parametrize(
    "words", [["-N4"], ["-N", "4"], ["-pgpu"], ["--exclude=n1"], ["-t", "90"], ["--qos", "x"]]
)
def test_options_of_sbatch_are_told_their_place(words: list[str]):
    ended = call("quickstart", *words, "--print")
    said = " ".join(ended.output.replace("\u2502", " ").split())
    assert ended.exit_code == 2
    assert "--sbatch=-pgpu" in said or (words[0] == "--qos" and "cluster.qos" in said), said
    assert "No such option: --tiem" in call("quickstart", "--tiem=4").output


def test_a_wrong_recipe_and_wrong_options_are_refused_together():
    ended = call("quickstart", "run.stepz=3", "rollout.batch_size=0", "--time", "1h", "--array", "x")
    assert ended.exit_code == 2
    assert all(name in ended.output for name in ("run.stepz", "rollout.batch_size", "--time", "--array"))


SCRIPTS = [
    *sorted((ROOT / "slurm").glob("*.s*")),
    *sorted((ROOT / "configs").rglob("*.sh")),
    *sorted((ROOT / "tests").rglob("*.sh")),
]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_every_script_is_sound(script: Path):
    subprocess.run(["bash", "-n", script], check=True, timeout=240)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "--severity=warning", script], check=True, timeout=240)


SCONTROL = """#!/bin/bash
echo "$*" >>"$CALLS"
case "$*" in
*"node up") echo "NodeName=up Arch=x86_64 State=ALLOCATED ThreadsPerCore=1" ;;
*"node silent") echo "NodeName=silent Arch=x86_64 State=MIXED* ThreadsPerCore=1" ;;
*"node gone") echo "NodeName=gone Arch=x86_64 State=DOWN+DRAIN ThreadsPerCore=1" ;;
*"show job 7") echo "JobId=7 PreemptEligibleTime=2026-11-27T22:46:48 PreemptTime=$PREEMPTED Power=" ;;
requeue*) exit "$REFUSED" ;;
esac
"""


@pytest.mark.parametrize("preempted", ["None", "2026-11-27T22:50:00"])
@pytest.mark.parametrize("refused", ["0", "1"])
def test_a_job_is_requeued_for_lost_nodes_and_preemptions(tmp_path: Path, preempted: str, refused: str):
    (tmp_path / "scontrol").write_text(SCONTROL)
    (tmp_path / "scontrol").chmod(0o755)
    script = batch_script().read_text()
    begin, end = script.index("# ---- a further start"), script.index("# Runs on every other node")
    calls = """
    say() { echo "$*"; }
    nodes=(up silent gone)
    unreachable
    if is_preempted; then start_again preempted 2>&1; fi
    """
    ended = subprocess.run(
        ["bash", "-uo", "pipefail", "-c", script[begin:end] + calls],
        env={
            "PATH": f"{tmp_path}:/usr/bin:/bin",
            "SLURM_JOB_ID": "7",
            "CALLS": str(tmp_path / "calls"),
            "log_dir": str(tmp_path),
            "job": "7",
            "code": "1",
            "stop_signal": "",
            "most_restarts": "5",
            "PREEMPTED": preempted,
            "REFUSED": refused,
        },
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    lines = ended.stdout.splitlines()
    assert lines[:2] == ["silent", "gone"]
    assert ("requeue 7" in (tmp_path / "calls").read_text().splitlines()) == (preempted != "None")
    assert any("submit it with --resume" in line for line in lines) == (
        preempted != "None" and refused == "1"
    )


def test_nothing_heavy_is_imported_for_a_submission():
    code = (
        "import sys; sys.argv[1:] = ['submit', 'quickstart', '--print']\n"
        "from slipstream.backend.cli.app import app\n"
        "try: app()\n"
        "except SystemExit as end: assert end.code == 0\n"
        "print(sorted({'torch', 'ray', 'sglang', 'transformers', 'megatron'} & set(sys.modules)))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert ended.stdout.splitlines()[-1] == "[]"


def test_submit_prints_the_command_of_a_recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    reward = "slipstream.rollout.reward.FinalAnswer"
    content = {**VALID, "rollout": {**VALID["rollout"], "reward": reward}, "prepare": NO_INPUTS}
    path.write_text(json.dumps(content))
    image = '{"runtime": "apptainer", "image": "/images/s.sif"}'
    ended = subprocess.run(
        [
            *[sys.executable, "-m", "slipstream.backend.cli", "submit", str(path), "run.steps=3"],
            *[
                f"cluster.container={image}",
                "--print",
                "--time",
                "2-00",
                "--resume",
                "--sbatch=--partition=big",
            ],
        ],
        env=environment(NO_COLOR="1", SLIPSTREAM_SITE=""),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    words = shlex.split(ended.stdout)
    assert {"SLIPSTREAM_CONTAINER=apptainer", "SLIPSTREAM_CONTAINER_IMAGE=/images/s.sif"} <= set(words)
    assert words[words.index("sbatch") :] == [
        *["sbatch", "--nodes=1", "--gpus-per-node=2", "--time=2-00", "--partition=big", str(batch_script())],
        *[str(path), "--resume", "run.steps=3", f"cluster.container={image}"],
    ]
