"""Judge processes: rewards are user code, and run where they can harm nobody but themselves.

    collector                                  judge, twice a process
    ─────────                                  ──────────────────────
    judge_pool ► seat ► judge_process ─── keeper ► worker (► asynchronous) ► the reward
                                 └── wire: questions and replies ──┘

`judge_pool` gives questions to processes and asks again when an attempt fails; `seat` keeps one process and
finds out which question ends it; `judge_process` starts and ends it. On the other side the keeper outlives
the reward and ends all processes that the reward has started. `limits` keeps it within its time and memory,
`judge_errors` says to the user why it ended, and `named_model` which language model it may ask.

A question has `timeout_s` seconds (of `rollout.judging` or `live.judging`) from the moment at which its
process begins with it. Then `asynchronous` cancels a coroutine; a plain function, or code that blocks the
event loop, ends with its process by the watchdog of `limits`. `seat` kills a process whose watchdog does not.
Each of these is a failed attempt. After `attempts` of them `judge_pool` raises JudgingFailed: the group of an
episode has then failed.
"""
