"""The process that runs episodes: assignments in, events out. It decides nothing about admission or training.

collector_process  one life of a collector: its connection, what it was told, and its end, also the one
            that a watchdog makes when a workflow blocks all others
groups      one assigned group: its episodes, its filter, its verdict
episodes    one episode: attempts and the time limit
parts       ... of which all of it is made; ``spec`` is what the process is started with
recording   the engines as one episode sees them, and the record that survives this process
seeded      ... with a seed for each request, where runs must be repeated
judging     the judge processes as episodes see them
evaluation  evaluation episodes
trial       episodes of ``slipstream try``
outbox      events, gathered into few frames
untrained_log  the episode log of what is never trained
"""
