"""The trainer's ranks: one process each, called together by the driver.

rank               the rank that trains a policy: its verbs, and a training step on one screen
minibatches          ... a batch as this rank's micro-batches
scoring              ... log-probs and values of the models that the recipe asks for
prepared             ... a micro-batch with its scores and targets
rewards              ... rewards of trajectories and turns, and penalties for leaving the reference
targets              ... advantages and returns
protocols            ... the methods of a user's code on ranks
plugins              ... the objects of that code, and checks of what they return
hooks                ... the points at which the recipe's ``rollout.hooks`` come in; ``slime`` adapts them
policy_update        ... optimizer updates of the policy
critic               ... optimizer updates of the critic
skipping             ... updates that no rank makes, and what is at fault
learning_rate        ... the learning rate of a step
publishing           ... weights to the engines, which start from ``engine_checkpoint``
rehearsal            ... the largest micro-batch, to see how much memory is left
episode_log          ... what a step has trained, as text
reward_model       the rank that trains a reward model
checkpointed_rank  what both do about checkpoints
preload            imports for the process that ranks are forked from
"""
