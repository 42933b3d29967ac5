"""Convert weights between Megatron shards and HF tensors, and publish them to the engines.

The rooms, from the bottom up; each imports only rooms above it in this list:

    hf         an HF checkpoint directory: config.json, the index of tensors, quantized weights, reading and
               writing files
    model      a decoder-only transformer: its geometry, its parallel layout, and the terms in which a family
               maps Megatron parameters to HF tensors
    families   one module per HF ``model_type``, which reads the config and lists the mappings
    shards     the export plan, and what follows it: check, load and export; what a rank sends to an engine
    publish    the steps that bring every engine to a new policy version, and their report
    group      where ranks of the trainer and of an engine meet
    engine     inside the engine's processes: where its parameters are, and how they receive
    transport  the ways in which weights travel to the engines

The package imports neither Ray nor ``rollout`` nor ``backend``: an engine is any object that satisfies
``publish.endpoint.EngineEndpoint``. Recipes are checked and plans are printed without torch, so these modules
do not import it: ``hf.config``, ``hf.index``, ``hf.quantization``, ``model``, ``families``, ``shards.plan``,
``shards.check``, ``publish.endpoint`` and ``publish.report``.
"""
