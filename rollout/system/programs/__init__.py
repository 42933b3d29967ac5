"""Programs of the user's that a process of ours runs, each with everything that it starts.

run_program ──lifeline── keeper ── program ── its children
     └───────── stdin, stdout, stderr ──┘

program       runs one, from its start to the end of its last process
hook_process  one that lives on and answers one request after the other
start         their commands, and that of every Python that calls one of our functions
keeper        the process around each, which ends everything when the program or its owner has ended
call          a program that calls one function
"""
