"""Wrong code of the user's: its import, its names, its arguments and its signatures."""

from tests.wrong_inputs.case import WrongInput

REWARD = "class Reward:\n    def score(self, prompt, response, trajectory):\n        return 1.0\n"


def _code(
    name: str,
    setting: str,
    module: str,
    source: str,
    *says: str,
    cls: str = "Mine",
    args: str = "{}",
    typed: bool = False,
    **more: object,
) -> WrongInput:
    """Return the case of a module with ``source`` that the recipe names. ``typed``: in a section of several
    types.
    """
    type_ = "type: plugin, " if typed else ""
    override = f"{setting}={{{type_}path: {module}.{cls}, args: {args}}}"
    return WrongInput(name, (setting, *says), overrides=(override,), files={f"{module}.py": source}, **more)


CASES = (
    WrongInput(
        "a module that is not there",
        ("rollout.reward = 'my_nothing.Reward'", "no Python package 'my_nothing'", "PYTHONPATH"),
        overrides=("rollout.reward=my_nothing.Reward",),
    ),
    WrongInput(
        "a module of a package that is not there",
        ("rollout.reward: my_sound_plugins.deeper.Reward", "cannot import", "correct the path"),
        overrides=("rollout.reward=my_sound_plugins.deeper.Reward",),
    ),
    WrongInput(
        "a name with a spelling mistake",
        ("rollout.reward: my_sound_plugins.Rewrd", "has no 'Rewrd'", "did you mean 'Reward'"),
        overrides=("rollout.reward=my_sound_plugins.Rewrd",),
    ),
    _code(
        "a syntax error",
        "rollout.reward",
        "my_syntax",
        "def score(:\n",
        "SyntaxError at FOLDER/my_syntax.py:1",
    ),
    _code(
        "an import that raises",
        "rollout.reward",
        "my_raising",
        "import os\nx = os.environ['NO_SUCH_KEY']\n",
        "cannot import my_raising",
        "KeyError: 'NO_SUCH_KEY' at FOLDER/my_raising.py:2",
    ),
    _code(
        "an import that exits",
        "rollout.workflow",
        "my_exiting",
        "import os\nos._exit(0)\n",
        "my_exiting.Mine",
        "ends the process",
    ),
    _code(
        "an import of a package that is not installed",
        "rollout.reward",
        "my_importing",
        "import a_package_of_nobodys\n",
        "No module named 'a_package_of_nobodys'",
        "install it",
    ),
    _code(
        "a number for a class", "rollout.reward", "my_number", "Mine = 5\n", "of type int", "expected a class"
    ),
    _code(
        "a reward without `score`",
        "rollout.reward",
        "my_scoreless",
        "class Mine:\n    def grade(self): ...\n",
        "no method `score` or `score_group`",
    ),
    _code(
        "a reward with other parameters",
        "rollout.reward",
        "my_parameters",
        "class Mine:\n    def score(self, response): ...\n",
        "`score(response)` cannot be called with (prompt, response, trajectory)",
    ),
    _code(
        "an argument that the reward does not have",
        "rollout.reward",
        "my_arguments",
        "class Mine:\n    def __init__(self, scale): ...\n"
        "    def score(self, prompt, response, trajectory): ...\n",
        "`scall` is unknown: did you mean `scale`?",
        "`scale` is missing",
        args="{scall: 1}",
    ),
    _code(
        "a workflow that is not async",
        "rollout.workflow",
        "my_plain",
        "class Mine:\n    def run(self, prompt, context): ...\n",
        "plain `def`",
        "expected `async def run(self, prompt, context)`",
    ),
    _code(
        "a workflow without `run`",
        "rollout.workflow",
        "my_runless",
        "class Mine: ...\n",
        "Mine has no method `run`",
    ),
    _code(
        "a filter that is async",
        "rollout.group_filter",
        "my_async",
        "class Mine:\n    async def keep(self, group): ...\n",
        "`keep` is `async def`",
        "always count as true",
    ),
    _code(
        "a filter with other parameters",
        "rollout.group_filter",
        "my_filter",
        "class Mine:\n    def keep(self): ...\n",
        "cannot be called as `def keep(self, group)`",
    ),
    WrongInput(
        "a tool that is not async",
        ("rollout.workflow", "my_tools.add", "is not `async def`"),
        overrides=(
            "rollout.workflow={path: slipstream.rollout.workflow.ToolUse, args: {tools: [my_tools.add], "
            "parser: qwen25}}",
        ),
        files={"my_tools.py": "def add(a: int) -> int:\n    return a\n"},
    ),
    WrongInput(
        "an environment without `step`",
        ("rollout.workflow", "my_world.World", "no method `step`", "async def step(self, action)"),
        overrides=(
            "rollout.workflow={path: slipstream.rollout.workflow.MultiTurn, "
            "args: {environment: my_world.World}}",
        ),
        files={
            "my_world.py": "class World:\n    async def reset(self, prompt): ...\n"
            "    async def close(self): ...\n"
        },
    ),
    WrongInput(
        "an agent's function with other parameters",
        ("rollout.workflow", "my_agent.solve", "cannot be called with (base_url, api_key, prompt, metadata)"),
        overrides=(
            "rollout.workflow={path: slipstream.rollout.workflow.Agent, args: {run: my_agent.solve}}",
        ),
        files={"my_agent.py": "def solve(prompt): ...\n"},
    ),
    _code(
        "an objective without `loss`",
        "actor.objective",
        "my_lossless",
        "class Mine:\n    def forward(self, tokens): ...\n",
        "Mine has no method `loss`",
        "def loss(self, tokens, old_logp_M)",
        "FOLDER/my_lossless.py:1",
        typed=True,
    ),
    _code(
        "an objective with other parameters",
        "actor.objective",
        "my_loss",
        "class Mine:\n    def loss(self, logp): ...\n",
        "cannot be called as `def loss(self, tokens, old_logp_M)`",
        "FOLDER/my_loss.py:2",
        typed=True,
    ),
    WrongInput(
        "an objective that corrects for staleness, in a recipe that does so too",
        (
            "actor.objective: my_mu.Mine says `corrects_staleness = True`, and the recipe false",
            "set actor.objective.corrects_staleness to true, and actor.use_decoupled_loss to false",
        ),
        overrides=("actor.objective={type: plugin, path: my_mu.Mine}",),
        files={
            "my_mu.py": "class Mine:\n    corrects_staleness = True\n"
            "    def loss(self, tokens, old_logp_M): ...\n"
        },
    ),
    WrongInput(
        "an objective of a module that is not there",
        ("actor.objective", "'my_losses.Mine'", "no Python package 'my_losses'", "PYTHONPATH"),
        overrides=("actor.objective={type: plugin, path: my_losses.Mine}",),
    ),
    WrongInput(
        "an objective whose importance weight nothing bounds",
        ("actor.objective.type = 'plugin'", "nothing bounds their effect", "actor.use_decoupled_loss"),
        overrides=(
            "actor.objective={type: plugin, path: my_sound_plugins.Reward}",
            "actor.use_decoupled_loss=false",
        ),
    ),
    WrongInput(
        "a term of the advantage with other parameters",
        ("actor.advantage: my_term.Mine", "def advantage(self, batch, micro, scores)", "FOLDER/my_term.py:2"),
        overrides=("actor.advantage=[{type: plugin, path: my_term.Mine}]",),
        files={"my_term.py": "class Mine:\n    def advantage(self, rewards): ...\n"},
    ),
    _code(
        "a penalty without `estimate`",
        "actor.kl.penalty",
        "my_penalty",
        "class Mine:\n    def penalty(self, logp, ref): ...\n",
        "no method `estimate`",
        "def estimate(self, logp_M, reference_logp_M)",
    ),
    WrongInput(
        "a penalty beside an estimate",
        ("actor.kl.estimator = 'k1'", "it has no effect", "leave one of them out"),
        overrides=("actor.kl={estimator: k1, penalty: my_sound_plugins.Reward}",),
    ),
    WrongInput(
        "a transform that is async, behind one that is sound",
        ("actor.transforms[1]: my_transforms.B", "`transform` is `async def`", "FOLDER/my_transforms.py:5"),
        overrides=("actor.transforms=[my_transforms.A, my_transforms.B]",),
        files={
            "my_transforms.py": "class A:\n    def transform(self, batch): ...\n\nclass B:\n"
            "    async def transform(self, batch): ...\n"
        },
    ),
    WrongInput(
        "a metric with an argument that it does not have",
        ("actor.metrics[0]: my_metric.Mine", "`windw` is unknown: did you mean `window`?"),
        overrides=("actor.metrics=[{path: my_metric.Mine, args: {windw: 3}}]",),
        files={
            "my_metric.py": "class Mine:\n    def __init__(self, window=1): ...\n"
            "    def metrics(self, batch, trained): ...\n"
        },
    ),
    WrongInput(
        "a data source without `prompts`",
        ("rollout.data_source: my_source.Mine", "no method `prompts`", "def prompts(self, start, count)"),
        overrides=("rollout.data_source=my_source.Mine", "data=null"),
        files={"my_source.py": "class Mine:\n    def __iter__(self): ...\n"},
    ),
    WrongInput(
        "a data source beside a prompt set",
        ("rollout.data_source = 'my_sound_plugins.Reward'", "two places", "leave `data` out"),
        overrides=("rollout.data_source=my_sound_plugins.Reward",),
    ),
    WrongInput(
        "a data source of slime's beside several prompt sets",
        (
            "data.sources = ['easy', 'hard']",
            "expected one file, data.path",
            "rollout.hooks.data_source (my_source.Mine)",
            "args.prompt_data",
            "leave rollout.hooks.data_source out",
        ),
        overrides=(
            "rollout.hooks.data_source=my_source.Mine",
            "data={sources: [{name: easy, path: FOLDER/data.jsonl}, {name: hard, path: FOLDER/data.jsonl}]}",
        ),
        files={"my_source.py": "class Mine:\n    def __init__(self, args): ...\n"},
    ),
    WrongInput(
        "a family without mappings",
        ("model.families.bert: my_families.my_family", "no function `mappings`", "def mappings(geometry)"),
        overrides=("model.families={bert: my_families.my_family}",),
        files={
            "my_families/__init__.py": "",
            "my_families/my_family.py": "def geometry(hf): ...\n",
        },
    ),
    WrongInput(
        "a family that raises",
        ("model.families", "KeyError: 'hidden'", "FOLDER/my_raising_families/my_family.py:2"),
        overrides=("model.families={qwen3: my_raising_families.my_family}",),
        files={
            "my_raising_families/__init__.py": "",
            "my_raising_families/my_family.py": "def geometry(hf):\n    return hf['hidden']\n"
            "def mappings(geometry): ...\n",
        },
    ),
    WrongInput(
        "a family that returns something else",
        ("model.path", "`geometry` of its family returned NoneType, expected Geometry"),
        overrides=("model.families={qwen3: my_other_families.my_family}",),
        files={
            "my_other_families/__init__.py": "",
            "my_other_families/my_family.py": "def geometry(hf): ...\ndef mappings(geometry): ...\n",
        },
    ),
    _code(
        "a `prepare` with other parameters",
        "prepare",
        "my_prepare",
        "def Mine(model_path): ...\n",
        "`data_path` is unknown",
    ),
    WrongInput(
        "wrong arguments of a reward that comes with Slipstream",
        ("rollout.reward", "pattern", "'('", "no regular expression"),
        overrides=("rollout.reward={path: slipstream.rollout.reward.Regex, args: {pattern: '('}}",),
    ),
    WrongInput(
        "a reward and a filter, both wrong",
        ("rollout.reward: my_sound_plugins.A", "rollout.group_filter: my_sound_plugins.B"),
        overrides=("rollout.reward=my_sound_plugins.A", "rollout.group_filter=my_sound_plugins.B"),
        count=2,
    ),
    _code(
        "a syntax error, at the start of a run",
        "rollout.reward",
        "my_late_syntax",
        "def score(:\n",
        "SyntaxError at FOLDER/my_late_syntax.py:1",
        arguments=("train", "FOLDER/recipe.yaml"),
    ),
)
