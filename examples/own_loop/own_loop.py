"""A training loop of your own: the real trainer and engines, one step after the other.

python -m examples.own_loop.own_loop [dotted.key=value ...]
"""

import sys

import slipstream


def main(overrides: list[str]) -> None:
    recipe = slipstream.load_recipe("examples/own_loop/recipe.yaml", overrides)
    with slipstream.OwnRun(recipe) as run:
        print(f"before training: reward {run.evaluate():.3f}")
        while run.steps_done < run.total_steps:
            batch = run.batch()  # engines have collected it, and go on
            rewards = [each.reward or 0.0 for each in batch.trajectories]
            stats = run.step(batch)  # one update for each mini-batch
            version = run.publish()  # into the running engines
            print(
                f"version {version}: reward {sum(rewards) / len(rewards):.3f}, "
                f"loss {stats['train/loss']:.4f}, entropy {stats['train/entropy']:.3f}"
            )
            if version % 5 == 0:
                print(f"  held out: reward {run.evaluate():.3f}")
    assert run.summary is not None
    print(f"trained on {run.summary.tokens_trained:,} tokens; {recipe.run.folder}/checkpoint-hf")


if __name__ == "__main__":
    main(sys.argv[1:])
