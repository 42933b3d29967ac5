"""Learning from live users: what gateways record becomes trajectories, and what came next their scores.

    gateways ──entries──► turns ──► ledger, on disk ──► control core: waiting
                            │                                │
                            ▼                                │
                         judging ──score──► ledger ──► control core: ready ──► batch

turns        all turns of open sessions: entries in, verdicts in, trajectories out
conversation the messages that a judge is shown
known        one turn in memory, and the branch that it ends
batches      trajectories of the turns that train together
judging      asks judge processes about turns, again and again until there is a verdict
votes        makes one verdict of several
baseline     what a score is compared with
status       numbers for metrics
"""
