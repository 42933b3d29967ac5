"""Sessions: which conversation a request continues, and which ids its prompt consists of.

    sameness    digests that are equal for equal messages
    chains      ids and text of a branch; the ids of a prompt that continues it
    sampling    what the trainer cannot reproduce
    stored      turns and histories of one session
    placing     the session of a request that names none
    continuing  the turn that a request continues, and its prompt
    pairing     next states
    running     a request whose answers have not all ended
    recording   the entry of a turn
    restoring   sessions from the entries of a journal
    sessions    all of it together: ``Sessions`` is the ``Conversations`` of the gateway

Pure: no clock, no I/O, no tasks. Times and new names come in as arguments.
"""
