"""The trainer's ranks: one process each, called together by the driver.

rank               the rank that trains a policy: its verbs, and a training step on one screen
minibatches          ... a batch as this rank's micro-batches
scoring              ... log-probs and values of the models that the recipe asks for
prepared             ... a micro-batch with its scores and targets
rewards              ... rewards of trajectories and turns, and penalties for leaving the reference
targets              ... advantages and returns
hooks                ... the points at which the recipe's ``rollout.hooks`` come in
policy_update        ... optimizer updates of the policy
critic               ... optimizer updates of the critic
skipping             ... updates that no rank makes, and what is at fault
learning_rate        ... the learning rate of a step
publishing           ... weights to the engines
reward_model       the rank that trains a reward model
checkpointed_rank  what both do about checkpoints
preload            imports for the process that ranks are forked from
"""
