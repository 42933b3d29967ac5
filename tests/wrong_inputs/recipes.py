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
        "a recipe with another ending",
        ("FOLDER/recipe.yml: there is no such recipe file", "did you mean FOLDER/recipe.yaml?"),
        arguments=("check", "FOLDER/recipe.yml"),
    ),
    WrongInput(
        "a folder for a recipe",
        ("FOLDER: this is a folder", "expected a recipe file, such as FOLDER/recipe.yaml"),
        arguments=("check", "FOLDER"),
    ),
    WrongInput(
        "a recipe of another folder",
        (
            "data.path = 'mine.jsonl': there is no such file",
            "rollout.reward = 'my_there.score': there is no Python package 'my_there'",
            "FOLDER/there has it, and paths are relative to the folder where slipstream is called",
        ),
        arguments=("check", "FOLDER/there/recipe.yaml"),
        files={
            "there/recipe.yaml": "run: {name: x, steps: 1}\nmodel: {path: FOLDER/model}\n"
            "data: {path: mine.jsonl}\nrollout: {max_head_offpolicyness: 0, batch_size: 1, "
            "n_samples_per_prompt: 2, reward: my_there.score}\n",
            "there/mine.jsonl": "",
            "there/my_there.py": "",
        },
        count=3,
    ),
    WrongInput(
        "a recipe in another encoding",
        ("FOLDER/recipe.yaml: the recipe is not UTF-8 text", "save it as UTF-8"),
        files={"recipe.yaml": "run: {name: x}".encode("utf-16")},
    ),
    WrongInput(
        "a tab",
        ("FOLDER/recipe.yaml", "line 2", "indent with spaces"),
        files={"recipe.yaml": "run:\n\tname: x\n"},
    ),
    WrongInput(
        "a recipe before its checkpoint",
        ("FOLDER/recipe.yaml: expected a checkpoint, and then the recipe",),
        arguments=("eval", "FOLDER/recipe.yaml", "FOLDER/model"),
    ),
    WrongInput(
        "a folder with a recipe, which is no run",
        ("FOLDER: no metrics.jsonl or inputs.json in it; expected the folder of a run",),
        arguments=("report", "FOLDER"),
    ),
    WrongInput(
        "a folder of runs for a run",
        ("FOLDER: no metrics.jsonl in it; expected the folder of a run, such as FOLDER/runs/mine",),
        arguments=("watch", "FOLDER"),
        files={"runs/mine/metrics.jsonl": ""},
    ),
    WrongInput(
        "a configuration to import that is not there",
        ("FOLDER/no.sh: no such file; expected a configuration of verl",),
        arguments=("import", "verl", "FOLDER/no.sh", "-o", "FOLDER/out.yaml"),
    ),
    WrongInput(
        "data for a recipe",
        ("FOLDER/data.jsonl: expected a YAML file with run, model, data and so on",),
        arguments=("check", "FOLDER/data.jsonl"),
    ),
    WrongInput(
        "names of other systems",
        (
            "learning_rate = 0.1: unknown key; did you mean actor.optimizer.lr?",
            "num_generations = 4: unknown key; did you mean rollout.n_samples_per_prompt?",
            "trainer = {'total_epochs': 3}: unknown key; did you mean run.epochs?",
        ),
        overrides=("learning_rate=0.1", "num_generations=4", "trainer.total_epochs=3"),
        count=3,
    ),
    WrongInput(
        "a learning rate without its minus",
        ("actor.optimizer.lr = 25000.0: expected at most 1",),
        overrides=("actor.optimizer.lr=2.5e4",),
    ),
    WrongInput(
        "a number in quotes",
        ("run.steps = '10': expected a whole number or null, without quotes",),
        overrides=('run.steps="10"',),
    ),
    WrongInput(
        "a setting in three words",
        ("override 'run.steps': there is no '='", "key=value, without spaces"),
        overrides=("run.steps", "=", "3"),
        count=3,
    ),
    WrongInput(
        "a variable in a path",
        ("model.path = '$MODELS/policy': variables are not read in a recipe; expected /data/models/policy",),
        overrides=("model.path=$MODELS/policy",),
        environment={"MODELS": "/data/models"},
    ),
    WrongInput(
        "a model's name on the hub",
        (
            "model.path = 'some-lab/tiny'",
            "no config.json",
            "hf://some-lab/tiny, which the run downloads",
        ),
        overrides=("model.path=some-lab/tiny",),
    ),
    WrongInput(
        "a model's address on the hub",
        ("model.path", "it has no config.json", "hf://some-lab/tiny, which the run downloads"),
        overrides=("model.path=https://huggingface.co/some-lab/tiny",),
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
        "a penalty in training",
        ("rollout.sampling.args.frequency_penalty = 1", "off-policy", "eval.sampling.args.frequency_penalty"),
        overrides=("rollout.sampling.args={frequency_penalty: 1}",),
    ),
    WrongInput(
        "a sampling parameter that SGLang does not have",
        ("rollout.sampling.args.presence_penality", "no such field in SamplingParams", "did you mean"),
        overrides=("rollout.sampling.args={presence_penality: 0}",),
    ),
    WrongInput(
        "a seed that has no effect",
        ("rollout.sampling.seed = 7", "expected null", "enable_deterministic_inference: true"),
        overrides=("rollout.sampling.seed=7",),
    ),
    WrongInput(
        "one seed for all completions of a group",
        ("rollout.sampling.seed", "expected a seed", "completions of a group would be equal"),
        overrides=("rollout.engine.args={enable_deterministic_inference: true}",),
    ),
    WrongInput(
        "a stop token that the model does not have",
        ("rollout.sampling.stop_token_ids", "expected token ids of the model's vocabulary", "[99999]"),
        overrides=("rollout.sampling.stop_token_ids=[99999]",),
    ),
    WrongInput(
        "least lengths without an importance weight",
        ("rollout.sampling.min_new_tokens = 4", "expected 0", "actor.use_decoupled_loss"),
        overrides=(
            "rollout.sampling.min_new_tokens=4",
            "actor.use_decoupled_loss=false",
            "actor.recompute_logprobs=false",
            "actor.correction={token: null}",
        ),
    ),
    WrongInput(
        "an evaluation that chooses from no token",
        ("eval.sampling.top_k = 0", "expected -1", "number of tokens"),
        overrides=("eval.sampling={top_k: 0}",),
    ),
    WrongInput(
        "one path and several sources",
        ("data.path = 'FOLDER/data.jsonl'", "expected either one file, or several", "data.sources"),
        overrides=("data.sources=[{name: a, path: FOLDER/data.jsonl}]",),
    ),
    WrongInput(
        "no prompts at all",
        ("data.path", "missing, but required", "data.sources"),
        overrides=("data={shuffle: true}",),
    ),
    WrongInput(
        "a weight for some sources only",
        ("data.sources.1.weight", "expected a weight for each source or for none", "b"),
        overrides=(
            "data={sources: [{name: a, path: FOLDER/data.jsonl, weight: 1}, "
            "{name: b, path: FOLDER/data.jsonl}]}",
        ),
    ),
    WrongInput(
        "two sources of one name",
        ("data.sources.1.name = 'a'", "expected names that differ"),
        overrides=(
            "data={sources: [{name: a, path: FOLDER/data.jsonl}, {name: a, path: FOLDER/data.jsonl}]}",
        ),
    ),
    WrongInput(
        "a source that is not there",
        ("data.sources.0.path = 'FOLDER/no.jsonl'", "there is no such file"),
        overrides=("data={sources: [{name: a, path: FOLDER/no.jsonl}]}",),
    ),
    WrongInput(
        "a weight of nothing",
        ("data.sources.0.weight = 0", "expected more than 0"),
        overrides=("data={sources: [{name: a, path: FOLDER/data.jsonl, weight: 0}]}",),
    ),
    WrongInput(
        "a template without a column",
        ("data.prompt_template = 'Solve it'", "names no column", "such as {question}"),
        overrides=("data.prompt_template=Solve it",),
    ),
    WrongInput(
        "a template beside a column for the prompt",
        ("data.columns.prompt = 'question'", "data.prompt_template makes it", "leave one of them out"),
        overrides=("data.prompt_template='{a}'", "data.columns={prompt: question}"),
    ),
    WrongInput(
        "files that no name matches",
        ("data.path = 'FOLDER/part-*.jsonl'", "no file has such a name"),
        overrides=("data.path=FOLDER/part-*.jsonl",),
    ),
    WrongInput(
        "a variable of the chat template that Slipstream sets",
        ("model.template_args", "add_generation_prompt", "Slipstream sets"),
        overrides=("model.template_args={add_generation_prompt: false}",),
    ),
    WrongInput(
        "two transports of one GPU",
        ("weights.transport.type = 'shards'", "NCCL", "'disk' or 'delta'"),
        overrides=("rollout.engine.colocated=true", "weights.transport={type: shards}"),
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
        "a field of SGLang for what Slipstream does not have",
        ("rollout.engine.args.speculative_algorithm = 'EAGLE'", "no speculative decoding", "leave it out"),
        overrides=("rollout.engine.args={speculative_algorithm: EAGLE}",),
    ),
    WrongInput(
        "a value of a field of SGLang that is out of range",
        ("rollout.engine.args.mem_fraction_static = 7.5", "expected a number between 0 and 1"),
        overrides=("rollout.engine.args={mem_fraction_static: 7.5}",),
    ),
    WrongInput(
        "a stop expression that has no greatest length",
        ("rollout.sampling: stop_regex: 'a+'", "give each repetition an upper bound"),
        overrides=("rollout.sampling.args={stop_regex: a+}",),
    ),
    WrongInput(
        "a field of Megatron that changes the model",
        ("actor.megatron.moe_expert_capacity_factor = 0.5", "drops no tokens", "leave it out"),
        overrides=("actor.megatron={moe_expert_capacity_factor: 0.5}",),
    ),
    WrongInput(
        "a value of a field of Megatron that changes the model",
        ("actor.megatron.moe_router_load_balancing_type = 'sinkhorn'", "expected none or aux_loss"),
        overrides=("actor.megatron={moe_router_load_balancing_type: sinkhorn}",),
    ),
    WrongInput(
        "an untested field of Megatron",
        ("actor.megatron.tp_comm_overlap = true", "untested", "actor.untested: [tp_comm_overlap]"),
        overrides=("actor.megatron={tp_comm_overlap: true}",),
    ),
    WrongInput(
        "a refused field that is listed as untested",
        ("actor.untested = 'mtp_num_layers'", "cannot be set, tested or not", "multi-token prediction"),
        overrides=("actor={megatron: {mtp_num_layers: 1}, untested: [mtp_num_layers]}",),
    ),
    WrongInput(
        "recomputed layers that do not divide those of the model",
        ("actor.megatron.recompute_num_layers = 7", "expected a divisor of"),
        overrides=("actor={recompute: full, megatron: {recompute_num_layers: 7}}",),
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
