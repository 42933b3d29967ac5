"""Settings of logs and trackers, and the halves of a run."""

from tests.wrong_inputs.case import WrongInput

CASES = (
    WrongInput(
        "Weights & Biases without a project",
        ("log.wandb.project: missing, but required",),
        overrides=("log.wandb={mode: offline}",),
    ),
    WrongInput(
        "a mode that Weights & Biases does not have",
        ("log.wandb.mode = 'disabled'", "'online' or 'offline'"),
        overrides=("log.wandb={project: p, mode: disabled}",),
    ),
    WrongInput(
        "MLflow by a setting of another name",
        ("log.mlflow.uri", "unknown key", "tracking_uri (required)"),
        overrides=("log.mlflow={uri: 'http://127.0.0.1:5000'}",),
        count=2,
    ),
    WrongInput(
        "trackers whose packages are not installed",
        (
            "log.wandb: the package wandb is not installed",
            "`pip install wandb`",
            "log.mlflow: the package mlflow is not installed",
        ),
        arguments=("train", "FOLDER/recipe.yaml"),
        overrides=("log.wandb={project: p}", "log.mlflow={tracking_uri: 'sqlite://'}"),
        count=2,
    ),
    WrongInput(
        "both halves at once",
        ("--debug-rollout-only has no trainer", "--debug-train-only no engines", "expected one"),
        arguments=("train", "--debug-rollout-only", "--debug-train-only", "FOLDER", "FOLDER/recipe.yaml"),
    ),
    WrongInput(
        "a half of a run that goes on",
        ("--resume", "a run without trainer or engines starts anew", "--overwrite"),
        arguments=("train", "--debug-rollout-only", "--resume", "FOLDER/recipe.yaml"),
    ),
    WrongInput(
        "no saved batches where they should be",
        ("--debug-train-only", "no step-*.safetensors found in FOLDER", "--debug-rollout-only"),
        arguments=("train", "--debug-train-only", "FOLDER", "FOLDER/recipe.yaml"),
    ),
    WrongInput(
        "fewer saved batches than steps",
        ("1 batches found in FOLDER/batches", "2 expected for run.steps", "run.steps=1"),
        files={"batches/step-000001.safetensors": b"x"},
        arguments=("train", "--debug-train-only", "FOLDER", "FOLDER/recipe.yaml"),
    ),
    WrongInput(
        "files that are no saved batches",
        (
            "FOLDER/batches/step-000001.safetensors: expected a batch that --debug-rollout-only has saved",
            "FOLDER/batches/step-000002.safetensors: expected",
        ),
        files={"batches/step-000001.safetensors": b"x", "batches/step-000002.safetensors": b""},
        arguments=("train", "--debug-train-only", "FOLDER", "FOLDER/recipe.yaml"),
        count=2,
    ),
    WrongInput(
        "a job that resumes what it deletes",
        ("--resume goes on with a run that --overwrite deletes",),
        arguments=("submit", "--resume", "--overwrite", "FOLDER/recipe.yaml"),
    ),
)
