"""Every field of Megatron's configs of models and optimizers: what a recipe may set in ``actor.megatron``.

The classes are TransformerConfig with its base ModelParallelConfig, MLATransformerConfig and OptimizerConfig
of megatron-core 0.16.1 and 0.19.2. See ``fields`` for the four verdicts.
"""

from slipstream.configs.installed.fields import allowed, instead_of, only, owned, refused, table, untested

_OLD, _NEW = "0.16.1", "0.19.2"
_TESTED = "tests/integration/test_megatron_fields.py"

_ADAM = "Slipstream trains with Adam; its settings are in actor.optimizer"
_FROM_MODEL = "the value follows from config.json in model.path and cannot change for a trained checkpoint"
_NO_LAYOUT = "Slipstream builds the process groups from actor.parallel, which does not have this dimension"
_BY_SLIPSTREAM = "Slipstream sets this field, and the loss and the batches depend on it"
_ANOTHER_MODEL = "it changes what the model computes, so that it is not the model of the checkpoint any more"
_NOT_THE_ENGINES = (
    "it changes what the trainer computes but not what the engines compute, so their log-probs disagree; "
    "leave it out"
)
_NO_MTP = "Slipstream does not train multi-token prediction; leave it out"
_NO_FP8 = (
    "Slipstream does not train in fp8 or fp4: the trainer computes in model.dtype; "
    "rollout.engine.quantization is for the engines"
)
_NO_OFFLOAD = (
    "Slipstream does not move activations or weights to the host's memory; actor.recompute saves memory"
)
_NO_OPTIMIZER_OFFLOAD = (
    "Slipstream cannot write or read the checkpoints of an optimizer on the host; "
    "actor.optimizer.distributed shards the state over ranks"
)
_PRECISION = (
    "Slipstream keeps main weights and Adam's state in float32, and its checkpoints hold them as such; "
    "leave it out"
)
_NO_DROPPING = (
    "Slipstream drops no tokens: engines drop none, and their log-probs would not agree; leave it out"
)
_NO_GRAPHS = "Slipstream does not capture the trainer in CUDA graphs: packs differ in shape; leave it out"
_NO_INFERENCE = "the trainer does not generate: engines do; leave it out"
_NO_MAMBA = "Slipstream has no Mamba layers; leave it out"
_NO_OTHER_INIT = "every weight comes from the checkpoint, so there is nothing to initialize; leave it out"
_NO_REPLAY = "Slipstream replays experts by code of its own; use actor.routing_replay instead"
_FUNCTION = "it is a function that Slipstream or Megatron sets, and a recipe cannot hold one; leave it out"
_PROFILING = "it is for Megatron's own training loop, which Slipstream does not use; leave it out"

_KERNEL = "this kernel of GPUs has not been run here"
_EXCHANGE = "this exchange of tokens between the ranks of experts has not been run here"
_OVERLAP = "this overlap of communication and computation has not been run here"
_PIPELINE = "this detail of pipeline communication has not been run here"
_OPTIMIZER = "this variant of the optimizer has not been run here"

MEGATRON_FIELDS = table(
    # ---- what a recipe may set
    allowed("recompute_method recompute_num_layers", _TESTED),
    allowed("recompute_modules", _TESTED, items=("core_attn", "mlp", "moe", "shared_experts")),
    allowed("deterministic_mode", _TESTED),
    allowed("moe_router_dtype", _TESTED, ("fp32", "fp64")),
    allowed("moe_router_load_balancing_type", _TESTED, ("none", "aux_loss")),
    allowed("moe_aux_loss_coeff moe_z_loss_coeff", _TESTED),
    allowed("apply_wd_to_qk_layernorm", "tests/integration/test_optimizer.py"),
    allowed(
        "apply_rope_fusion bias_activation_fusion moe_permute_fusion", "tests/unit/test_megatron_fusions.py"
    ),
    allowed(
        "attention_backend",
        "Transformer Engine's choice of a kernel for the same attention",
        ("auto", "flash", "fused", "unfused"),
    ),
    allowed("moe_token_dispatcher_type", "the value that Slipstream sets", ("alltoall",)),
    allowed("moe_token_drop_policy", "Megatron's default, without effect as no token is dropped", ("probs",)),
    allowed("moe_router_bias_update_rate", "the value that Slipstream sets", (0, 0.0)),
    allowed(
        "gradient_accumulation_fusion masked_softmax_fusion bias_dropout_fusion persist_layer_norm",
        "the value that Slipstream sets",
        (False,),
    ),
    # ---- settings of Slipstream's
    owned("tensor_model_parallel_size", instead_of("actor.parallel.tensor")),
    owned("pipeline_model_parallel_size", instead_of("actor.parallel.pipeline")),
    owned("sequence_parallel", instead_of("actor.parallel.sequence")),
    owned(
        "virtual_pipeline_model_parallel_size overlap_p2p_comm batch_p2p_comm",
        instead_of("actor.parallel.virtual_pipeline"),
    ),
    owned("expert_model_parallel_size", instead_of("actor.parallel.expert")),
    owned("expert_tensor_parallel_size", instead_of("actor.parallel.expert_tensor")),
    owned("context_parallel_size", instead_of("actor.parallel.context")),
    owned("hierarchical_context_parallel_sizes hybrid_context_parallel", _NO_LAYOUT),
    owned("max_seqlen_per_dp_cp_rank", instead_of("actor.microbatch_tokens")),
    only(_OLD, owned("moe_extended_tp", instead_of("actor.parallel.expert_tensor"))),
    only(
        _NEW,
        owned(
            "tensor_parallel_num_weight_shards gtp_weight_remat_size "
            "expert_tensor_parallel_num_weight_shards expert_gtp_weight_remat_size",
            _NO_LAYOUT,
        ),
    ),
    owned(
        "num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage pipeline_model_parallel_layout "
        "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split",
        instead_of("actor.parallel.layers"),
    ),
    owned("lr", instead_of("actor.optimizer.lr and actor.optimizer.warmup_steps")),
    owned("min_lr", instead_of("actor.optimizer.decay.min_lr")),
    owned(
        "decoupled_lr decoupled_min_lr",
        "Slipstream trains all weights with one learning rate, actor.optimizer.lr",
    ),
    owned("weight_decay", instead_of("actor.optimizer.weight_decay")),
    owned("adam_beta1", instead_of("actor.optimizer.beta1")),
    owned("adam_beta2", instead_of("actor.optimizer.beta2")),
    owned("adam_eps", instead_of("actor.optimizer.eps")),
    owned("clip_grad", instead_of("actor.optimizer.clip_grad")),
    owned("use_distributed_optimizer", instead_of("actor.optimizer.distributed")),
    owned("overlap_param_gather", instead_of("actor.optimizer.overlap_param_gather")),
    owned(
        "overlap_param_gather_with_optimizer_step", "Slipstream gathers all weights before it publishes them"
    ),
    owned(
        "optimizer sgd_momentum muon_momentum muon_split_qkv muon_scale_mode muon_fp32_matmul_prec "
        "muon_num_ns_steps muon_tp_mode muon_extra_scale_factor",
        _ADAM,
    ),
    only(_OLD, owned("muon_use_nesterov", _ADAM)),
    only(
        _NEW,
        owned(
            "muon_nesterov muon_coefficient_type muon_scalar_optimizer lion_beta1 lion_beta2 "
            "soap_shampoo_beta soap_precondition_frequency soap_use_kl_shampoo adaptive_muon_moment2_method "
            "adaptive_muon_beta2 adaptive_muon_eps",
            _ADAM,
        ),
    ),
    owned("bf16 fp16 params_dtype pipeline_dtype enable_autocast autocast_dtype", instead_of("model.dtype")),
    owned("moe_grouped_gemm transformer_impl", instead_of("actor.layer_spec")),
    owned("recompute_granularity", instead_of("actor.recompute")),
    owned(
        "calculate_per_token_loss variable_seq_lengths use_cpu_initialization perform_initialization",
        _BY_SLIPSTREAM,
    ),
    owned(
        "hidden_dropout attention_dropout",
        "Slipstream trains without dropout: the engines have none, and their log-probs would not agree",
    ),
    owned(
        "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels "
        "normalization layernorm_epsilon layernorm_zero_centered_gamma add_bias_linear add_qkv_bias "
        "gated_linear_unit activation_func qk_layernorm qk_l2_norm multi_latent_attention "
        "rotary_interleaved window_size window_attn_skip_freq softmax_scale softmax_type num_moe_experts "
        "moe_ffn_hidden_size moe_layer_freq moe_router_topk moe_router_score_function "
        "moe_router_pre_softmax moe_router_enable_expert_bias moe_router_topk_scaling_factor "
        "moe_router_num_groups moe_router_group_topk moe_shared_expert_intermediate_size "
        "moe_shared_expert_gate attention_output_gate glu_linear_offset activation_func_clamp_value "
        "linear_attention_freq linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim "
        "linear_num_key_heads linear_num_value_heads no_rope_freq mrope_section "
        "experimental_attention_variant dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk "
        "moe_latent_size apply_residual_connection_post_layernorm init_method_std "
        "q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type rotary_base "
        "rotary_percent rotary_scaling_factor original_max_position_embeddings beta_fast beta_slow mscale "
        "mscale_all_dim",
        _FROM_MODEL,
    ),
    only(
        _NEW,
        owned(
            "dsa_indexer_topk_freq dsa_indexer_skip_topk_offset dsa_indexer_rope_interleaved "
            "dsa_indexer_rotate_activation dsa_indexer_scoring_relu dsa_indexer_k_norm_epsilon "
            "moe_mlp_glu_interleave_size moe_shared_expert_glu_interleave_size",
            _FROM_MODEL,
        ),
    ),
    # ---- another model than that of the checkpoint and the engines
    refused("moe_expert_capacity_factor moe_pad_expert_input_to_capacity moe_token_dropping", _NO_DROPPING),
    refused(
        "moe_input_jitter_eps moe_router_force_load_balancing moe_router_topk_limited_devices "
        "moe_apply_probs_on_input apply_query_key_layer_scaling heterogeneous_block_specs "
        "hetereogenous_dist_checkpoint is_hybrid_model",
        _ANOTHER_MODEL,
    ),
    refused("qk_clip qk_clip_alpha qk_clip_threshold", _ADAM),
    refused(
        "dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss",
        "Slipstream does not train sparse attention's indexer; leave it out",
    ),
    refused("mtp_num_layers mtp_loss_scaling_factor mtp_standalone", _NO_MTP),
    refused("moe_enable_routing_replay", _NO_REPLAY),
    refused(
        "mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads use_mamba_mem_eff_path", _NO_MAMBA
    ),
    only(
        _NEW,
        refused(
            "moe_router_quantile_balancing_ema moe_router_force_biased moe_expert_rank_capacity_factor "
            "use_mup mup_width_mult mup_base_hidden_size mup_embedding_mult mup_output_mult "
            "mup_base_head_dim mup_attn_scale_power",
            _ANOTHER_MODEL,
        ),
        refused(
            "mtp_grad_scale_func mtp_use_repeated_layer mtp_detach_heads mtp_hybrid_override_pattern", _NO_MTP
        ),
        refused("mamba_training_ssm_states_dtype", _NO_MAMBA),
    ),
    # ---- what Slipstream does not have
    refused(
        "fp8 fp8_recipe fp8_param fp8_quantizer_factory fp8_margin fp8_interval fp8_amax_history_len "
        "fp8_amax_compute_algo fp8_wgrad fp8_dot_product_attention fp8_multi_head_attention "
        "tp_only_amax_red first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 "
        "fp4 fp4_recipe fp4_param fp4_quantizer_factory quant_recipe use_kitchen use_kitchen_attention "
        "kitchen_attention_backend activation_func_fp8_input_store reuse_grad_buf_for_mxfp8_param_ag "
        "moe_router_padding_for_quantization moe_router_padding_for_fp8 disable_parameter_transpose_cache",
        _NO_FP8,
    ),
    only(_NEW, refused("fp8_output_proj", _NO_FP8)),
    refused(
        "cpu_offloading cpu_offloading_num_layers cpu_offloading_activations cpu_offloading_weights "
        "cpu_offloading_double_buffering fine_grained_activation_offloading offload_modules "
        "min_offloaded_tensor_size",
        _NO_OFFLOAD,
    ),
    only(
        _NEW,
        refused(
            "cpu_offloading_retain_pinned_cpu_buffers delay_offload_until_cuda_graph "
            "delta_offload_bytes_across_pp_ranks activation_offload_fraction "
            "fine_grained_offloading_max_inflight_offloads moe_paged_stash moe_paged_stash_page_size "
            "moe_paged_stash_buffer_size_factor_cuda moe_paged_stash_buffer_size_factor_cpu",
            _NO_OFFLOAD,
        ),
    ),
    refused(
        "optimizer_cpu_offload optimizer_offload_fraction use_torch_optimizer_for_cpu_offload "
        "overlap_cpu_optimizer_d2h_h2d pin_cpu_grads pin_cpu_params",
        _NO_OPTIMIZER_OFFLOAD,
    ),
    refused(
        "use_precision_aware_optimizer store_param_remainders main_grads_dtype main_params_dtype "
        "exp_avg_dtype exp_avg_sq_dtype",
        _PRECISION,
    ),
    refused(
        "loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis",
        "it scales the loss of float16, in which Slipstream does not train; leave it out",
    ),
    refused(
        "enable_cuda_graph cuda_graph_use_single_mempool cuda_graph_retain_backward_graph "
        "cuda_graph_warmup_steps external_cuda_graph cuda_graph_impl cuda_graph_scope use_te_rng_tracker",
        _NO_GRAPHS,
    ),
    only(_NEW, refused("optimizer_cuda_graph cuda_graph_modules", _NO_GRAPHS)),
    refused(
        "flash_decode inference_rng_tracker inference_sampling_seed use_inference_optimized_layers "
        "inference_fuse_tp_communication mlp_chunks_for_prefill cache_mla_latents symmetric_ar_type",
        _NO_INFERENCE,
    ),
    only(
        _NEW,
        refused(
            "inference_cuda_graph_scope nccl_all_reduce_for_prefill inference_disable_triton_nvls_kernels "
            "inference_grouped_gemm_backend inference_moe_disable_fused_quant_kernels "
            "inference_moe_token_dispatcher_type moe_pad_experts_for_cuda_graph_inference",
            _NO_INFERENCE,
        ),
    ),
    refused(
        "init_method output_layer_init_method embedding_init_method embedding_init_method_std "
        "init_model_with_meta_device",
        _NO_OTHER_INIT,
    ),
    refused(
        "finalize_model_grads_func grad_scale_func no_sync_func grad_sync_func param_sync_func timers",
        _FUNCTION,
    ),
    only(
        _NEW,
        refused("moe_grad_scale_func experimental_attention_variant_loss_scale_func", _FUNCTION),
    ),
    refused("test_mode config_logger_dir barrier_with_L1_time moe_per_layer_logging", _PROFILING),
    refused(
        "log_num_zeros_in_grad log_max_attention_logit", "Slipstream records no such metric; leave it out"
    ),
    refused(
        "defer_embedding_wgrad_compute wgrad_deferral_limit cross_entropy_loss_fusion "
        "cross_entropy_fusion_impl",
        "Slipstream has an LM head and a loss of its own (actor.lm_head); leave it out",
    ),
    refused(
        "use_ring_exchange_p2p num_microbatches_with_partial_activation_checkpoints",
        "Slipstream's pipeline schedule does not have it; leave it out",
    ),
    only(
        _NEW,
        refused(
            "use_layer_wise_distributed_optimizer grad_norm_skip_threshold",
            "Slipstream's optimizer does not have it (actor.optimizer); leave it out",
        ),
    ),
    refused(
        "fp32_residual_connection disable_bf16_reduced_precision_matmul batch_invariant_mode",
        _NOT_THE_ENGINES,
    ),
    # ---- what only nobody has tried
    untested(
        "tp_comm_overlap tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag tp_comm_overlap_rs "
        "tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_atomic_ag tp_comm_split_rs tp_comm_atomic_rs "
        "tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1 tp_comm_bootstrap_backend "
        "overlap_moe_expert_parallel_comm delay_wgrad_compute ep_overlap_early_attn_memory_release "
        "moe_shared_expert_overlap clone_scatter_output_in_embedding",
        _OVERLAP,
    ),
    only(_OLD, untested("async_tensor_model_parallel_allreduce", _OVERLAP)),
    only(
        _NEW,
        untested(
            "overlap_dispatch_backward_with_experts_wgrad high_priority_a2a_comm_stream "
            "mlp_chunks_for_training",
            _OVERLAP,
        ),
    ),
    untested(
        "batch_p2p_sync deallocate_pipeline_outputs overlap_p2p_comm_warmup_flush "
        "microbatch_group_size_per_vp_stage pipeline_model_parallel_comm_backend",
        _PIPELINE,
    ),
    untested(
        "moe_enable_deepep moe_flex_dispatcher_backend moe_deepep_num_sms moe_hybridep_num_sms", _EXCHANGE
    ),
    only(
        _NEW,
        untested(
            "moe_permute_fusion_into_hybridep moe_hybridep_pad_uneven_dispatch_inputs "
            "moe_flex_dispatcher_num_sms moe_hybridep_num_blocks_permute moe_hybridep_num_blocks_unpermute "
            "moe_hybridep_num_sms_preprocessing moe_ncclep_static_shape moe_ncclep_zero_copy",
            _EXCHANGE,
        ),
    ),
    untested(
        "memory_efficient_layer_norm use_fused_weighted_squared_relu fused_single_qkv_rope moe_router_fusion "
        "use_te_activation_func attention_softmax_in_fp32",
        _KERNEL,
    ),
    only(_OLD, untested("moe_use_legacy_grouped_gemm", _KERNEL)),
    only(
        _NEW,
        untested(
            "flash_attention_version dsa_kernel_backend dsa_indexer_k_norm_fp32 fused_residual_rmsnorm "
            "use_transformer_engine_op_fuser use_grouped_gemm_for_shared_expert "
            "use_grouped_gemm_for_dense_mlp moe_single_grouped_weight moe_single_grouped_bias "
            "mla_down_proj_fusion",
            _KERNEL,
        ),
    ),
    untested(
        "distribute_saved_activations moe_layer_recompute", "this way to save memory has not been run here"
    ),
    untested("cp_comm_type", "this exchange of context-parallel ranks has not been run here"),
    untested("decoupled_weight_decay", _OPTIMIZER),
)
