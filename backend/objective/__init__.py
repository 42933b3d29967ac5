"""Pure functions on tensors: log-probs, advantages, ratios, losses. No process state but the groups given.

    logprob        log-probs and entropies from hidden states, over a vocabulary that ranks share
    softmax          ... and the softmax that is accumulated block by block
    head_kernels     ... in a pair of Triton kernels
    advantage      advantages: of trajectories from rewards; of tokens from values, turns or a teacher
    losses         the loss of each token, as the recipe says: the way in for the trainer
    policy_loss      ... every loss that ships, and what losses share: ratios, sums over trajectories
    correction       ... importance weights and masks for tokens that another policy sampled
    kl             divergence from a reference model
    distillation   divergence from a teacher's likeliest tokens
    averaging      which tokens, trajectories or prompts have equal weight in the loss
    value          losses of a critic and of a reward model
    statistics     metrics of a training step
    names          what statistics and metrics are both called
    typed_torch    torch functions that carry no types of their own

Legend: T tokens of a pack or batch, M of them with loss, N trajectories, V vocabulary. ``owner_T`` (int64):
the trajectory of each token, one of ``owners``.

mu is the behaviour policy, which sampled a token; pi_old is the proximal policy, whose weights the training
step starts from; pi is the policy being updated.
"""
