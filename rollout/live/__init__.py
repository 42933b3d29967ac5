"""Learning from live users: what gateways record becomes trajectories, and what came next their scores.

    gateways ──entries──► turns ──► ledger, on disk ──► control core: waiting
                            │                                │
                            ▼                                │
                         judging ──score──► ledger ──► control core: ready ──► batch

receiver     the connections with gateways, at ``driver_address``, for ``gateway_messages``
live_turns   all turns of open sessions: entries in, trajectories out, and restarts
verdicts     the turns that wait for verdicts, what becomes of them, and what is wrong with a turn
table        what both share: turns, sessions, the control core
conversation the messages that a judge is shown, and how they are stored
batches      trajectories of the turns that train together
judging      asks judge processes about turns, again and again until there is a verdict
baseline     what a score is compared with
status       numbers for metrics
"""
