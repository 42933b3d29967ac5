"""Judge processes: rewards are user code, and run where they can harm nobody but themselves.

    collector                          judge, twice a process
    ─────────                          ──────────────────────
    pool.py ► seat.py ► process.py ─── keeper.py ► worker.py ► synchronous.py | asynchronous.py ► the reward
                            └── wire.py: questions and replies ──┘

`pool.py` gives questions to processes and asks again when an attempt fails; `seat.py` keeps one process and
finds out which question ends it; `process.py` starts and ends it. On the other side `keeper.py` outlives the
reward and ends whatever the reward leaves behind.
"""
