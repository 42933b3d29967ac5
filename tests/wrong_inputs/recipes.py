"""Wrong recipes: types, names, contradictions and paths."""

from tests.wrong_inputs.case import WrongInput

CASES = (
    WrongInput(
        "a text where a number is expected",
        ("run.steps = 'many'", "expected", "whole number"),
        overrides=("run.steps=many",),
    ),
    WrongInput(
        "a setting with a spelling mistake",
        ("rollout.batchsize", "did you mean", "rollout.batch_size"),
        overrides=("rollout.batchsize=4",),
    ),
    WrongInput(
        "an unknown type of a section",
        ("actor.objective.type = 'ppoo'", "did you mean 'ppo'"),
        overrides=("actor.objective={type: ppoo}",),
    ),
    WrongInput(
        "three mistakes at once",
        ("run.steps = 0", "model.dtyp", "actor.optimizer.lr = -1"),
        overrides=("run.steps=0", "model.dtyp=float32", "actor.optimizer.lr=-1"),
        count=4,
    ),
    WrongInput(
        "a recipe that is not there", ("FOLDER/no.yaml", "no such"), arguments=("check", "FOLDER/no.yaml")
    ),
    WrongInput(
        "a recipe that is no YAML",
        ("FOLDER/recipe.yaml", "line 2"),
        files={"recipe.yaml": "run: {name: x\nmodel: ]\n"},
    ),
    WrongInput(
        "a boolean for a number",
        ("rollout.n_samples_per_prompt = true", "expected", "whole number"),
        overrides=("rollout.n_samples_per_prompt=true",),
    ),
    WrongInput(
        "a name that is no name of a folder",
        ("run.name = '../x'", "expected"),
        overrides=('run.name="../x"',),
    ),
    WrongInput(
        "truncated sampling",
        ("rollout.sampling.top_p = 0.9", "expected 1", "importance weight"),
        overrides=("rollout.sampling.top_p=0.9",),
    ),
    WrongInput(
        "two transports of one GPU",
        ("weights.transport.type = 'distributed'", "NCCL", "'disk' or 'delta'"),
        overrides=("rollout.engine.colocated=true", "weights.transport={type: distributed}"),
    ),
    WrongInput(
        "groups without a spread",
        ("rollout.n_samples_per_prompt = 1", "expected at least 2", "nothing is learned"),
        overrides=("rollout.n_samples_per_prompt=1", "rollout.batch_size=4"),
    ),
    WrongInput(
        "fewer trajectories than ranks",
        ("rollout.batch_size = 2", "4 trajectories", "expected at least 8"),
        overrides=("actor.minibatches=8",),
    ),
    WrongInput(
        "a completion that fills the context",
        ("rollout.sampling.max_new_tokens = 512", "expected less than 512", "max_position_embeddings"),
        overrides=("rollout.sampling.max_new_tokens=512",),
    ),
    WrongInput(
        "a model that is not there",
        ("model.path = 'FOLDER/nowhere'", "no config.json", "Hugging Face checkpoint directory"),
        overrides=("model.path=FOLDER/nowhere",),
    ),
    WrongInput(
        "prompts that are not there",
        ("data.path = 'FOLDER/no.jsonl'", "no such file", "prepare"),
        overrides=("data.path=FOLDER/no.jsonl",),
    ),
    WrongInput(
        "prompts of an unknown format",
        ("data.path = 'FOLDER/data.csv'", ".jsonl or .parquet"),
        files={"data.csv": "prompt,label\n"},
        overrides=("data.path=FOLDER/data.csv",),
    ),
    WrongInput(
        "a run folder that is a file",
        ("run.root = 'FOLDER/data.jsonl'", "expected a directory"),
        overrides=("run.root=FOLDER/data.jsonl",),
    ),
    WrongInput(
        "an unknown field of SGLang",
        ("rollout.engine.args.max_runing_requests", "max_running_requests"),
        overrides=("rollout.engine.args={max_runing_requests: 4}",),
    ),
    WrongInput(
        "a layout that does not fit the model",
        ("actor.parallel.tensor = 3", "4"),
        overrides=("actor.parallel.tensor=3",),
    ),
    WrongInput(
        "no reward for prompts",
        ("rollout.reward", "missing", "slipstream.rollout.reward.Reward"),
        overrides=("rollout.reward=null",),
    ),
)
