"""SGLang: its process, its HTTP client, the pool of engines, and support for machines without a GPU.

A server, from its arguments to its end:

    server_process   its arguments, its start as a child process, its end
    launch             ... the program of that process, with every change to SGLang in ``patches``
    dead_ends          ... such as the end of a request whose grammar allows no token
    cpu                ... on a machine without a GPU
    toolchain          ... where it compiles kernels
    leftovers          ... and what is removed after SIGKILL
    adapters         engines that serve the policy as an adapter
    actor            the Ray actor that owns a server
    supervisor       keeps the engines serving: starts, restarts, the current weights

A request:

    engine_pool      picks an engine, and goes on with another one when it is lost
    pace               ... by the time that each takes for a token
    client           sends requests; refuses those that must not be sent
    sampling           ... whose sampling parameters are wrong
    grammars           ... whose grammar is too large
    context            ... that do not fit into the context
    model_limits       ... of the model
    connection         ... over HTTP; ``server_control`` has the calls that generate nothing
    completion       reads replies: each token gets its policy version
    growing            ... in a completion that grows
    whole_calls      reads tool calls in answers
    request_trace    times of every request, for the simulator

Which engines serve:

    roster           on the driver
    routing            ... whose messages tell collectors and gateways
    asked_engines    those that a judge process may ask
    descriptors      file descriptors of a process that asks engines
"""
