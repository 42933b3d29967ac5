"""What is wrong with a conversion is said at once and with exit code 2, before a process is started."""

import json
import shlex
import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from slipstream.backend.cli.app import app
from slipstream.backend.commands.convert import LayoutOptions, WrongInput, hf_to_megatron, megatron_to_hf
from tests.models import make_checkpoint
from tests.unit.test_cli import started


@pytest.fixture(autouse=True)
def _no_ranks(monkeypatch):
    def start(*_: object, **__: object) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.setattr("slipstream.backend.commands.convert.run_ranks", start)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("mixture"), "qwen3_moe")


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "out"


def refused(call, *args) -> list[str]:
    with pytest.raises(WrongInput) as raised:
        call(*args)
    return str(raised.value).splitlines()


def test_every_violation_is_reported_in_the_words_of_the_command_line(mixture, tmp_path):
    (tmp_path / "out").mkdir()
    ended = started(
        *("convert", "hf-to-megatron", str(mixture), str(tmp_path / "out")),
        *("--tensor", "3", "--pipeline", "3", "--expert", "3"),
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "Traceback" not in ended.stderr and "actor.parallel" not in ended.stderr
    for beginning in (
        "--tensor = 3: expected",
        "--pipeline = 3: expected",
        "--expert = 3: expected",
        "OUT: ",
    ):
        assert any(line.startswith(beginning) for line in ended.stderr.splitlines()), beginning
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"tensor": 0}, "--tensor = 0: expected at least 1"),
        ({"layers": "1,x"}, "--layers = [1, 'x']: expected a list of whole numbers or null"),
        ({"pipeline": 2, "layers": "1,4"}, "--layers = [1, 4]: expected 2 numbers"),
        ({"virtual_pipeline": 2}, "--virtual-pipeline = 2: expected 1"),
        ({"expert_tensor": 3}, "--expert-tensor = 3: expected a divisor of 32"),
    ],
)
def test_each_option_of_the_layout_is_checked(options, expected, mixture, out):
    assert any(
        line.startswith(expected)
        for line in refused(hf_to_megatron, mixture, out, LayoutOptions(**options), None)
    )


@pytest.mark.parametrize(
    ("options", "data"),
    [
        ({}, 1),
        ({"expert": 4}, 4),
        ({"tensor": 2, "expert": 4, "expert_tensor": 1}, 2),
        ({"tensor": 2, "expert": 2}, 2),
    ],
)
def test_there_are_as_many_replicas_as_the_experts_need(options, data):
    assert LayoutOptions(**options).settings()["data"] == data


def test_widths_that_the_ranks_cannot_share_are_named(tmp_path, out):
    model = make_checkpoint(tmp_path / "model", intermediate_size=97)
    [line] = refused(hf_to_megatron, model, out, LayoutOptions(tensor=2), None)
    assert line.startswith("97 feed-forward dimensions cannot be split evenly over 2") and "--tensor" in line


def test_a_model_that_is_none_or_not_supported_is_refused(tmp_path, out):
    [absent] = refused(hf_to_megatron, tmp_path / "no", out, LayoutOptions(), None)
    assert absent.startswith("MODEL: ") and "config.json does not exist" in absent
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    [bert] = refused(hf_to_megatron, tmp_path, out, LayoutOptions(), None)
    assert "model_type 'bert' is not mapped" in bert


@pytest.fixture
def dots1(tmp_path) -> Path:
    return make_checkpoint(tmp_path / "model", "dots1")


def test_a_model_of_another_family_is_read_with_the_module_that_is_named(dots1, out):
    def refusal(*families: str) -> list[str]:
        return refused(hf_to_megatron, dots1, out, LayoutOptions(tensor=3), None, families)

    assert any("with --family MODEL_TYPE=IMPORT.PATH" in line for line in refusal())
    problems = refusal("dots1=examples.family.dots1")
    assert problems[0].startswith("--tensor = 3")
    assert not any("MODEL" in line for line in problems)
    back = refused(megatron_to_hf, dots1, out, dots1, LayoutOptions(), ("dots1=examples.family.dots1",))
    assert len(back) == 1 and back[0].startswith("CHECKPOINT: ")


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("examples.family.dots1", "--family examples.family.dots1: expected MODEL_TYPE=IMPORT.PATH"),
        ("dots1=", "expected MODEL_TYPE=IMPORT.PATH"),
        ("dots1=no_such_package.family", "--family dots1: no_such_package.family: cannot import"),
        ("dots1=json.decoder", "there is no function `geometry`, expected `def geometry(hf)`"),
    ],
)
def test_a_family_that_cannot_be_used_is_named(family, expected, dots1, out):
    lines = refused(hf_to_megatron, dots1, out, LayoutOptions(), None, (family,))
    assert expected in lines[0]


def test_a_family_that_raises_is_named_with_its_line(dots1, out, tmp_path, monkeypatch):
    (tmp_path / "my_family_that_raises.py").write_text(
        "class family:\n    def geometry(hf):\n        return hf['no']\n    def mappings(geometry): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    family = ("dots1=my_family_that_raises.family",)
    [line] = refused(hf_to_megatron, dots1, out, LayoutOptions(), None, family)
    assert line.startswith("--family: it raised") and "my_family_that_raises.py:3" in line


def test_missing_tensors_are_listed(tmp_path, out):
    model = make_checkpoint(tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    del tensors["model.norm.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, model / "model.safetensors")
    lines = refused(hf_to_megatron, model, out, LayoutOptions(tensor=3), None)
    assert "  missing: model.norm.weight" in lines
    assert "  missing: model.layers.1.mlp.up_proj.weight" in lines
    assert lines[0].startswith("--tensor = 3")


def test_what_is_no_megatron_checkpoint_is_refused(mixture, tmp_path, out):
    [line] = refused(megatron_to_hf, mixture, out, mixture, LayoutOptions())
    assert line.startswith("CHECKPOINT: ") and "expected metadata.json" in line
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    [line] = refused(megatron_to_hf, tmp_path, out, mixture, LayoutOptions())
    assert "names the format 'zarr'; 'torch_dist' is read" in line


def test_a_damaged_checkpoint_of_a_run_is_refused(mixture, tmp_path, out):
    folder = tmp_path / "v00000001"
    folder.mkdir()
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    (folder / "checkpoint.json").write_text("{}")
    [line] = refused(megatron_to_hf, folder, out, mixture, LayoutOptions())
    assert "is damaged: checkpoint.json cannot be understood" in line
    [line] = refused(megatron_to_hf, tmp_path, out, mixture, LayoutOptions())
    assert "no checkpoint" in line and "can be used" in line


def test_a_place_where_nothing_can_be_made_is_refused(mixture, tmp_path):
    (tmp_path / "file").write_text("")
    [line] = refused(hf_to_megatron, mixture, tmp_path / "file" / "out", LayoutOptions(), None)
    assert line.startswith("OUT: cannot make") and "Not a directory" in line


@pytest.fixture
def made(monkeypatch) -> list[tuple[object, ...]]:
    """The conversions that the command line asks for, of which none is done."""
    asked: list[tuple[object, ...]] = []

    def convert(*arguments: object, **_: object) -> str:
        asked.append(arguments)
        return "converted"

    monkeypatch.setattr("slipstream.backend.commands.convert.hf_to_megatron", convert)
    monkeypatch.setattr("slipstream.backend.commands.convert.megatron_to_hf", convert)
    return asked


@pytest.mark.parametrize("kind", ["hf-to-megatron", "megatron-to-hf", "megatron-to-peft"])
def test_a_conversion_ends_with_commands_that_go_on_from_it(made, kind: str):
    model = [] if kind == "hf-to-megatron" else ["--model", "a model"]
    words = ["convert", kind, "in", "two words", *model, "--family", "dots1=my.dots"]
    handler = signal.getsignal(signal.SIGTERM)
    try:
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
        first, *following = [shlex.split(line, comments=True) for line in done.stdout.splitlines()]
        assert first == ["converted"] and following
        if kind == "megatron-to-hf":
            assert [(command[1], "two words" in command) for command in following] == [
                ("eval", True),
                ("init", True),
            ]
        else:
            assert CliRunner().invoke(app, following[0][1:]).exit_code == 0
            source = "two words" if kind == "hf-to-megatron" else "in"
            assert made[1][:2] == (Path(source), Path("two words-hf")) and made[1][4] == ["dots1=my.dots"]
    finally:
        signal.signal(signal.SIGTERM, handler)
