"""What newcomers type: YAML, values and names as elsewhere."""

from collections.abc import Callable

from tests.wrong_inputs.case import WrongInput


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
)
