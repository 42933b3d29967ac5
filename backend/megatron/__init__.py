"""Everything that touches Megatron-Core: process groups, models, optimizers, checkpoints.

A process first joins its groups; only then may it import the files below that import Megatron:

    parallel           joins the process groups and seeds: the first call of every rank
    groups             this rank's place in them
    cpu                what Megatron needs on a machine without a GPU
    pipeline_shapes    a repair of Megatron's two-stage interleaved pipeline

From an HF checkpoint to a model:

    model              builds a model, its DDP and its optimizer
    config               ... from Megatron's TransformerConfig
    layer_spec           ... of Transformer Engine's layers or of plain PyTorch's
    layers               ... whose specs for each layer are these
    local_layers         ... with modules that the local spec lacks
    delta_net            ... linear attention with a gated delta rule
    sparse_attention     ... attention to the tokens that an indexer chooses
    tree_attention       ... attention to the tokens of a prefix tree
    rotation             ... rotary embeddings of packs
    router               ... and the router of experts
    fusions              ... in fused kernels, where there are any
    lora                 ... and adapters, with the export of their factors
    supported          models that these layers cannot compute in some layouts
    marks              attributes of parameters that Megatron reads
    export_plan        the order in which the weights leave the trainer

What a model computes:

    packed_model       runs a model over micro-batches; language models and models of values
    device_batch         ... from a copy of each on the device
    head                 ... which end in log-probs or in a value
    trained            a model with an optimizer: one update
    finite             checks that updates, and weights that leave, are finite on all ranks
    frozen             a model without: reference, teacher, average

State:

    checkpoint         a rank's share of a checkpoint
    checkpoint_writer    ... written by a thread while training goes on
    node_checkpoint      ... and all that the rank needs on disks of nodes
    weights              ... of the model's weights
    optimizer_state      ... of Adam's state
    random_state         ... of random generators
    conversion         HF checkpoints to Megatron's format and back
    resting            GPU memory that is given up while engines use the GPU
"""
