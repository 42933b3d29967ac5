"""What newcomers type: YAML, values and names as elsewhere, and paths that lead to something else."""

from collections.abc import Callable

from tests.wrong_inputs.case import WrongInput

REPORT = ("report", "FOLDER/run", "--no-audit")
RUN = {"run/metrics.jsonl": '{"step": 1}\n'}


def with_(old: str, new: str) -> Callable[[str], str]:
    """Return what replaces a text of the sound recipe, which must have it."""

    def replaced(text: str) -> str:
        assert old in text, text
        return text.replace(old, new)

    return replaced


def _value(name: str, override: str, meant: str) -> WrongInput:
    setting = override.partition("=")[0]
    return WrongInput(name, (setting, f"; did you mean {meant}?"), overrides=(override,))


CASES = (
    WrongInput(
        "a setting with an equals sign in the file",
        ("line 18, column 3", "write `key: value`, with a colon and a space"),
        files={"recipe.yaml": with_("steps: 2", "steps = 2")},
    ),
    WrongInput(
        "a setting without a space behind its colon",
        ("line 18, column 3", "write `key: value`, with a colon and a space"),
        files={"recipe.yaml": with_("steps: 2", "steps:2")},
    ),
    WrongInput(
        "a no-break space behind a colon",
        ("line 18, column 3", "a space of another kind stands there"),
        files={"recipe.yaml": with_("steps: 2", "steps:\u00a02")},
    ),
    WrongInput(
        "no-break spaces before a key",
        ("steps", "a space of another kind stands there"),
        files={"recipe.yaml": with_("  steps", "\u00a0\u00a0steps")},
    ),
    WrongInput(
        "dots in a key of the file",
        ("run.steps = 7: unknown key; dots join keys on the command line only: write run: {steps: 7}",),
        files={"recipe.yaml": lambda text: f"{text}\nrun.steps: 7\n"},
    ),
    WrongInput(
        "two recipes in one file",
        ("line 20", "keep one, without a line ---"),
        files={"recipe.yaml": lambda text: f"{text}\n---\nrun: {{name: y}}\n"},
    ),
    WrongInput(
        "TOML in a recipe",
        ("FOLDER/recipe.yaml", "line 2", "write `key: value`, with a colon and a space"),
        files={"recipe.yaml": "[run]\nname = 'x'\n"},
    ),
    WrongInput(
        "a tag of another system",
        ("'!env'", "leave the tag out"),
        files={"recipe.yaml": with_("name: test", "name: !env USER")},
    ),
    WrongInput(
        "a template in a recipe",
        ("templates are not read", "in quotes"),
        files={"recipe.yaml": with_("name: test", "name: {{ name }}")},
    ),
    _value("thousands by a letter", "run.steps=10k", "10000"),
    _value("thousands by a comma", "run.steps=1,000", "1000"),
    _value("a whole number with an exponent", "run.steps=1e3", "1000"),
    _value("a decimal comma", "actor.optimizer.lr=0,0001", "0.0001"),
    _value("percent", "actor.optimizer.lr=50%", "0.5"),
    _value("a number of C", "actor.optimizer.lr=1e-6f", "1e-06"),
    _value("yes", "actor.use_decoupled_loss=yes", "true"),
    _value("1 for true", "actor.use_decoupled_loss=1", "true"),
    _value("off", "actor.use_decoupled_loss=Off", "false"),
    _value("None of Python", "run.epochs=None", "null"),
    _value("none for a section", "eval=none", "null"),
    WrongInput(
        "a variable in a number",
        ("run.steps = '$STEPS'", "variables are not read in a recipe"),
        overrides=("run.steps=$STEPS",),
    ),
    WrongInput(
        "a setting before the recipe",
        ("run.steps=3: this is a setting; expected a recipe first, and settings after it",),
        arguments=("check", "run.steps=3", "FOLDER/recipe.yaml"),
    ),
    WrongInput(
        "two recipes",
        ("sft.yaml': expected one recipe, and then settings as key=value",),
        arguments=("check", "FOLDER/recipe.yaml", "FOLDER/sft.yaml"),
    ),
    WrongInput(
        "a recipe without a command",
        ("expected a command before the recipe, such as train FOLDER/recipe.yaml",),
        arguments=("FOLDER/recipe.yaml",),
    ),
    WrongInput(
        "a file for a run",
        ("FOLDER/data.jsonl: this is a file; expected the folder of a run",),
        arguments=("report", "FOLDER/data.jsonl"),
    ),
    WrongInput(
        "a file for a run whose ledger is wanted",
        ("FOLDER/data.jsonl: this is a file; expected the folder of a run",),
        arguments=("audit", "FOLDER/data.jsonl"),
    ),
    WrongInput(
        "a file for a run or a job",
        ("FOLDER/data.jsonl: this is a file; expected the folder of a run",),
        arguments=("status", "FOLDER/data.jsonl"),
    ),
    WrongInput(
        "a timeline of no folder",
        ("FOLDER/no: no such folder; expected the folder of a run",),
        arguments=("trace", "FOLDER/no"),
    ),
    WrongInput(
        "a folder for a file of a run",
        ("FOLDER/run/metrics.jsonl: Is a directory",),
        arguments=("watch", "--once", "FOLDER/run"),
        files={"run/metrics.jsonl/x": ""},
    ),
    WrongInput(
        "a folder for a page",
        ("FOLDER/model: this is a folder; expected a file to write, such as FOLDER/model/report.html",),
        arguments=(*REPORT, "-o", "FOLDER/model"),
        files={**RUN},
    ),
    WrongInput(
        "a page in a folder that is not there",
        ("FOLDER/no/x.html: there is no folder FOLDER/no: make it, or name another file",),
        arguments=(*REPORT, "-o", "FOLDER/no/x.html"),
        files={**RUN},
    ),
    WrongInput(
        "a folder for a timeline",
        ("FOLDER/model: this is a folder; expected a file to write, such as FOLDER/model/trace.json",),
        arguments=("trace", "FOLDER/run", "-o", "FOLDER/model"),
        files={"run/trace.jsonl": ""},
    ),
    WrongInput(
        "a folder to import",
        ("FOLDER/model: this is a folder; expected a configuration of slime",),
        arguments=("import", "slime", "FOLDER/model", "-o", "FOLDER/out.yaml"),
    ),
    WrongInput(
        "a script in another encoding",
        ("FOLDER/x.sh: this is not UTF-8 text",),
        arguments=("import", "slime", "FOLDER/x.sh", "-o", "FOLDER/out.yaml"),
        files={"x.sh": b"\xff\xfe\x00"},
    ),
    WrongInput(
        "an endless temperature",
        ("--temperature inf: expected a finite number",),
        arguments=("eval", "FOLDER/model", "FOLDER/recipe.yaml", "--temperature", "inf"),
    ),
    WrongInput(
        "a time limit of a variable that is not set",
        ("--time: '' found",),
        arguments=("submit", "FOLDER/recipe.yaml", "--time", "", "--print"),
    ),
    WrongInput(
        "seeds from the last to the first",
        ("--array: '3-0' found", "0-3"),
        arguments=("submit", "FOLDER/recipe.yaml", "--array", "3-0", "--print"),
    ),
)
