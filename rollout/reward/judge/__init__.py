"""Judge processes: rewards are user code, and run where they can harm nobody but themselves.

    collector                                  judge, twice a process
    ─────────                                  ──────────────────────
    judge_pool ► seat ► judge_process ─── keeper ► worker ► synchronous | asynchronous ► the reward
                                 └── wire: questions and replies ──┘

`judge_pool` gives questions to processes and asks again when an attempt fails; `seat` keeps one process and
finds out which question ends it; `judge_process` starts and ends it. On the other side the keeper outlives
the reward and ends all processes that the reward has started.
"""
