"""Programs of the user's that a process of ours runs, each with everything that it starts.

run_program ──lifeline── keeper ── program ── its children
     └───────── stdin, stdout, stderr ──┘

program   runs one, from its start to the end of its last process
served    one that lives on and answers one request after the other
start     starts both, and every Python that calls one of our functions
keeper    the process around it, which ends everything when the program or whoever runs it has ended
call      a program that calls one function
"""
