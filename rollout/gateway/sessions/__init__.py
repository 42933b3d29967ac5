"""Sessions: which conversation a request continues, and which ids its prompt consists of.

    sampling    sampling parameters that the trainer cannot reproduce
    stored      turns and histories of one session
    repeating   what a conversation repeats of a stored one, although it was rewritten
    placing     the session of a request that names none
    continuing  the turn that a request continues, and its prompt
    pairing     next states
    running     a request whose answers have not all ended
    recording   the entry of a turn
    rewarding   which turns a client's reward goes to
    restoring   sessions from the entries of a journal
    counters    numbers for metrics
    sessions    all of it together: ``Sessions`` is the ``Conversations`` of the gateway

Digests of messages and chains of token ids are in ``rollout/tokens/conversation``.

Pure: no clock, no I/O, no tasks. Times and new names come in as arguments.
"""
