"""Every field of SGLang's ServerArgs and SamplingParams (0.5.21): what a recipe may set in ``args``.

Flags of SGLang's command line that have another name than their field stand in ``FLAGS``. See ``fields`` for
the four verdicts.
"""

from collections.abc import Mapping

from slipstream.configs.installed.fields import (
    Table,
    allowed,
    instead_of,
    owned,
    refused,
    table,
    untested,
)

FLAGS: Mapping[str, str] = {
    "model": "model_path",
    **dict.fromkeys(("tp", "tensor_parallel_size"), "tp_size"),
    **dict.fromkeys(("dp", "data_parallel_size"), "dp_size"),
    **dict.fromkeys(("ep", "expert_parallel_size"), "ep_size"),
    **dict.fromkeys(("pp", "pipeline_parallel_size"), "pp_size"),
    "cuda_graph_bs": "cuda_graph_bs_decode",
    "cuda_graph_max_bs": "cuda_graph_max_bs_decode",
    "speculative_draft_model": "speculative_draft_model_path",
}
"""Other names that SGLang's command line has, or had, for a field."""

_RUNS = "tests/runs/engines/test_engine_args.py"

_NO_SPECULATION = (
    "Slipstream has no speculative decoding (EAGLE, MTP, n-grams): a draft model would keep its old "
    "weights; leave it out"
)
_NO_DISAGGREGATION = (
    "Slipstream does not split engines into prefill, decode and encode servers: each engine does all; "
    "leave it out"
)
_NO_ROUTING = (
    "Slipstream asks for the experts of tokens itself (actor.routing_replay: rollout), and takes over no "
    "other inner values; leave it out"
)
_NO_OFFLOAD = (
    "Slipstream publishes weights into the engines' GPU memory, which must hold all of them: use "
    "rollout.engine.tensor_parallel, or rollout.engine.quantization"
)
_QUANTIZING = "the trainer sends weights as rollout.engine.quantization says; use that setting instead"
_ADAPTERS = instead_of("actor.lora.serve")
_PLACES = "Slipstream places the engines and chooses their addresses"
_KEYS = "every start of an engine draws a key of its own, which Slipstream's clients send"
_UNPROTECTED = "the engine would answer requests that its key does not protect; leave it out"
_FROM_TOKENS = (
    "Slipstream reads and writes token ids, and renders chat templates and parses tool calls itself; use {}"
)
_ANOTHER_MODEL = (
    "the engine would compute another model than the one that is trained, and their log-probs would not "
    "agree; leave it out"
)
_ANOTHER_CLASS = "Slipstream serves language models that generate text; leave it out"
_NO_IMAGES = "Slipstream's requests have text alone; leave it out"
_NO_DIFFUSION = "Slipstream does not serve diffusion language models; leave it out"
_OTHER_WEIGHTS = (
    "an engine begins with the checkpoint in model.path, and gets each version from the trainer "
    "(weights.transport); leave it out"
)
_NO_OTHER_SPLIT = (
    "Slipstream splits engines by rollout.engine.tensor_parallel, data_parallel, expert_parallel and "
    "pipeline_parallel only; leave it out"
)
_MOVING_EXPERTS = (
    "experts that move or are doubled while an engine runs would not get the trainer's weights; leave it out"
)
_CACHE_OUTSIDE = (
    "a cache outside of the engine's memory would outlive the weights that its values were computed with; "
    "leave it out"
)
_STREAM = "Slipstream reads completions as token ids from a stream that it shapes itself; leave it out"
_CODE = "it loads code or files into the engine that Slipstream does not know; leave it out"

_KERNEL = "this kernel has not been run here"
_COMMUNICATION = "this communication between an engine's ranks has not been run here"
_SCHEDULE = "this way of scheduling has not been run here"
_GRAPHS = "this capture of CUDA graphs has not been run here"
_DEBUGGING = "this help for debugging has not been run here"
_RARE = "it has not been run here"

SGLANG_FIELDS = table(
    # ---- what a recipe may set
    allowed("max_running_requests max_total_tokens chunked_prefill_size context_length", _RUNS),
    allowed("disable_radix_cache disable_cuda_graph attention_backend enable_fp32_lm_head", _RUNS),
    allowed("mem_fraction_static schedule_policy max_prefill_tokens", _RUNS),
    allowed(
        "enable_deterministic_inference",
        "a request has the same result in every batch; rules/rollout.py asks for rollout.sampling.seed",
    ),
    allowed("sampling_backend", "runs on a GPU: docs/benchmarks.md", ("pytorch", "flashinfer")),
    allowed("enable_symm_mem enable_nccl_nvls", "tests/unit/test_rollout_gpu_environment.py"),
    allowed("disable_overlap_schedule radix_eviction_policy schedule_conservativeness sleep_on_idle", _RUNS),
    allowed(
        "enable_priority_scheduling default_priority_value retraction_policy "
        "priority_scheduling_preemption_threshold",
        _RUNS,
    ),
    allowed("log_level log_level_http decode_log_interval show_time_cost enable_metrics", _RUNS),
    allowed("watchdog_timeout soft_watchdog_timeout dist_timeout weight_loader_disable_mmap", _RUNS),
    allowed("mamba_full_memory_ratio", "it shares the memory out; backend/memory/engine_memory.py knows it"),
    # ---- settings of Slipstream's
    owned("model_path tokenizer_path revision", instead_of("model.path")),
    owned("device", instead_of("cluster.device")),
    owned("dtype", instead_of("model.dtype")),
    owned("tp_size", instead_of("rollout.engine.tensor_parallel")),
    owned("dp_size enable_dp_attention", instead_of("rollout.engine.data_parallel")),
    owned("ep_size", instead_of("rollout.engine.expert_parallel")),
    owned("pp_size", instead_of("rollout.engine.pipeline_parallel")),
    owned("nnodes", instead_of("rollout.engine.nodes")),
    owned("random_seed", instead_of("run.seed")),
    owned("preferred_sampling_params sampling_defaults", instead_of("rollout.sampling")),
    owned("stream_interval", instead_of("rollout.engine.stream_interval")),
    owned(
        "host port nccl_port dist_init_addr node_rank base_gpu_id gpu_id_step gated_launch_port numa_node",
        _PLACES,
    ),
    owned("api_key admin_api_key", _KEYS),
    owned(
        "tokenizer_worker_num grpc_port grpc_mode smg_grpc_mode smg_http_sidecar_port sidecar use_ray "
        "encoder_only",
        _UNPROTECTED,
    ),
    owned(
        "enable_lora max_lora_rank lora_target_modules lora_paths max_loras_per_batch max_loaded_loras "
        "lora_backend",
        _ADAPTERS,
    ),
    owned("weight_version", "Slipstream sets this field whenever it publishes a policy version"),
    owned("quantization modelopt_quant quantize_and_serve rl_quant_profile", _QUANTIZING),
    owned(
        "skip_server_warmup warmups",
        "Slipstream sets this field, and waits until the engine is healthy instead",
    ),
    owned("incremental_streaming_output", _STREAM),
    owned("custom_weight_loader", instead_of("weights.transport")),
    owned("enable_memory_saver enable_weights_cpu_backup", instead_of("rollout.engine.colocated")),
    owned(
        "chat_template hf_chat_template_name trust_request_chat_template default_chat_template_kwargs",
        _FROM_TOKENS.format("data.chat_template"),
    ),
    owned(
        "tool_call_parser reasoning_parser strip_thinking_cache enable_strict_thinking",
        _FROM_TOKENS.format("rollout.workflow, or the gateway's parsers"),
    ),
    # ---- another model than that of the trainer
    refused("json_model_override_args decrypted_config_file model_config_parser", _ANOTHER_MODEL),
    refused("load_format model_loader_extra_config model_checksum delete_ckpt_after_loading", _OTHER_WEIGHTS),
    refused(
        "modelopt_checkpoint_restore_path modelopt_checkpoint_save_path modelopt_export_path "
        "startup_weight_load_mode remote_instance_weight_loader_seed_instance_ip "
        "remote_instance_weight_loader_seed_instance_service_port "
        "remote_instance_weight_loader_send_weights_group_ports remote_instance_weight_loader_backend "
        "remote_instance_weight_loader_start_seed_via_transfer_engine engine_info_bootstrap_port "
        "modelexpress_config checkpoint_engine_wait_weights_before_ready weight_cache_mode "
        "weight_cache_socket weight_cache_timeout",
        _OTHER_WEIGHTS,
    ),
    refused(
        "quantization_param_path enable_w4a4_mxfp4_megamoe enable_deepseek_v4_fp4_indexer "
        "deepep_dispatcher_output_dtype enable_quant_communications",
        _QUANTIZING,
    ),
    refused("rl_on_policy_target", "it changes the kernels of SGLang for another trainer; leave it out"),
    refused("is_embedding prefill_only_disable_kv_cache", _ANOTHER_CLASS),
    refused("dllm_algorithm dllm_algorithm_config dllm_fdfo", _NO_DIFFUSION),
    refused(
        "sampling_mask_max_tokens enable_custom_logit_processor",
        "the engine would sample from another "
        "distribution than the one whose log-probs it reports; leave it out",
    ),
    # ---- what Slipstream does not have
    refused(
        "speculative_algorithm uno_lora_path speculative_draft_model_path speculative_boundary_reduction "
        "speculative_draft_model_revision speculative_draft_load_format speculative_num_steps "
        "speculative_eagle_topk speculative_num_draft_tokens speculative_dflash_block_size "
        "speculative_domino_candidate_pool_size speculative_dspark_block_size "
        "speculative_dspark_sps_table_path speculative_dspark_confidence_sts_path "
        "speculative_dspark_align_verify_tokens_to_graph_tier speculative_accept_threshold_single "
        "speculative_accept_threshold_acc speculative_use_rejection_sampling speculative_token_map "
        "speculative_attention_mode speculative_draft_attention_backend speculative_dsa_topk_backend "
        "speculative_draft_kv_cache_dtype speculative_draft_window_size speculative_draft_sink_size "
        "speculative_moe_runner_backend speculative_moe_a2a_backend speculative_draft_model_quantization "
        "speculative_skip_dp_mlp_sync enable_multi_layer_eagle speculative_adaptive "
        "speculative_adaptive_config spec_trace_dir speculative_ngram_min_bfs_breadth "
        "speculative_ngram_max_bfs_breadth speculative_ngram_match_type speculative_ngram_max_trie_depth "
        "speculative_ngram_capacity speculative_ngram_external_corpus_path "
        "speculative_ngram_external_sam_budget speculative_ngram_external_corpus_max_tokens "
        "decrypted_draft_config_file enable_draft_weights_cpu_backup enable_linear_replayssm_spec "
        "linear_attn_verify_backend decoupled_spec_bind_endpoint decoupled_spec_connect_endpoints "
        "decoupled_spec_rank decoupled_spec_role",
        _NO_SPECULATION,
    ),
    refused(
        "disaggregation_mode disaggregation_transfer_backend disaggregation_enable_kv_checksum "
        "disaggregation_bootstrap_port disaggregation_ib_device disaggregation_decode_enable_radix_cache "
        "disaggregation_decode_enable_offload_kvcache disaggregation_decode_retraction_backup "
        "num_reserved_decode_tokens disaggregation_decode_extra_slots disaggregation_decode_polling_interval "
        "enable_pd_role_switch optimistic_prefill_attempts language_only language_model_only "
        "encoder_transfer_backend encoder_urls encoder_bootstrap_port encoder_register_urls "
        "enable_adaptive_dispatch_to_encoder enable_pdmux pdmux_config_path sm_group_num "
        "disaggregation_decode_host_receive_threshold enable_encoder_swa_bounded_replay "
        "enable_decoder_swa_bounded_replay",
        _NO_DISAGGREGATION,
    ),
    refused(
        "enable_return_routed_experts enable_return_indexer_topk enable_return_hidden_states "
        "return_hidden_states_mode",
        _NO_ROUTING,
    ),
    refused(
        "cpu_offload_gb offload_group_size offload_num_in_group offload_prefetch_step offload_mode "
        "ple_offload_embedding ple_offload_backend ple_offload_dir kt_weight_path kt_method kt_cpuinfer "
        "kt_threadpool_count kt_num_gpu_experts kt_max_deferred_experts_per_token",
        _NO_OFFLOAD,
    ),
    refused(
        "enable_lora_overlap_loading lora_eviction_policy max_lora_chunk_size experts_shared_outer_loras "
        "lora_use_virtual_experts lora_strict_loading lora_drain_wait_threshold",
        "an engine serves one adapter, which Slipstream loads (actor.lora.serve); leave it out",
    ),
    refused(
        "ep_num_redundant_experts ep_dispatch_algorithm init_expert_location enable_eplb eplb_algorithm "
        "eplb_rebalance_num_iterations eplb_rebalance_layers_per_chunk "
        "eplb_min_rebalancing_utilization_threshold expert_distribution_recorder_mode "
        "expert_distribution_recorder_buffer_size expert_balancedness_report_mode elastic_ep_backend "
        "enable_elastic_expert_backup mooncake_ib_device enable_waterfill ep_join_mode "
        "elastic_ep_scale_timeout ep_join_rank_offset elastic_ep_initial_size max_ep_size",
        _MOVING_EXPERTS,
    ),
    refused(
        "dcp_size attn_cp_size moe_dp_size dwdp_size dcp_comm_backend dcp_replicate_q_proj enable_prefill_cp "
        "cp_strategy enable_dsa_cache_layer_split enable_cp_decode_attn_tp shared_experts_tp_size "
        "enable_shared_experts_attn_tp enable_dense_mlp_attn_tp enable_layernorm_sp load_balance_method",
        _NO_OTHER_SPLIT,
    ),
    refused(
        "radix_cache_backend enable_hierarchical_cache hicache_host_memory_mode hicache_ratio hicache_size "
        "hicache_host_memory_fraction hicache_write_policy hicache_io_backend hicache_mem_layout "
        "hicache_storage_backend hicache_storage_prefetch_policy hicache_storage_backend_extra_config "
        "hicache_storage_prefetch_retry_poll_interval hicache_storage_prefetch_retry_max_attempts "
        "enable_unified_cache_external_linker unified_cache_external_linker_backend enable_linker_mla_dedup "
        "enable_hisparse hisparse_config enable_lmcache lmcache_config_file enable_flexkv flexkv_config_file "
        "enable_session_radix_cache enable_streaming_session kv_events_config load_publish_endpoint",
        _CACHE_OUTSIDE,
    ),
    refused(
        "enable_multimodal mm_attention_backend enable_broadcast_mm_inputs_process enable_prefix_mm_cache "
        "mm_enable_dp_encoder mm_process_config mm_processor_worker_num mm_io_worker_num "
        "allowed_media_domains media_url_max_file_size_mb mm_preprocess_cache_size_mb "
        "trust_mm_content_hashes limit_mm_data_per_request enable_mm_global_cache image_processor_backend "
        "mm_global_cache_backend disable_fast_image_processor mm_feature_transport "
        "enable_precise_embedding_interpolation asr_max_buffer_seconds asr_max_concurrent_sessions",
        _NO_IMAGES,
    ),
    refused(
        "skip_tokenizer_init stream_response_default_include_usage return_input_ids return_output_ids "
        "batch_notify_size allow_auto_truncate completion_template enable_response_store tool_server "
        "disable_tokenizer_batch_decode enable_mis mlx_enable_sampling",
        _STREAM,
    ),
    refused(
        "sidecar_args enable_http2 http2_max_concurrent_streams http2_initial_connection_window_size "
        "ssl_keyfile ssl_certfile ssl_ca_certs ssl_keyfile_password enable_ssl_refresh fastapi_root_path "
        "grpc_response_timeout_secs grpc_worker_threads served_model_name file_storage_path",
        "Slipstream's clients speak to an engine at its own routes, without TLS and by its key; leave it out",
    ),
    refused("forward_hooks stat_loggers custom_sigquit_handler msprobe_dump_config", _CODE),
    # ---- what only nobody has tried
    untested("trust_remote_code", "code of the checkpoint has not been run here"),
    untested("page_size", "pages of several tokens need kernels of GPUs, which have not been run here"),
    untested(
        "weight_loader_prefetch_checkpoints weight_loader_prefetch_num_threads "
        "weight_loader_drop_cache_after_load",
        _RARE,
    ),
    untested("model_impl download_dir tokenizer_mode tokenizer_backend", _RARE),
    untested(
        "kv_cache_dtype prefill_kv_cache_dequant_dtype",
        "a rounded cache has not been run here, and log-probs of the engines then differ from the trainer's",
    ),
    untested(
        "decode_attention_backend enable_lean_attention prefill_attention_backend "
        "grammar_backend fp8_gemm_runner_backend fp4_gemm_runner_backend bf16_gemm_backend "
        "dsa_prefill_backend dsv4_prefill_backend dsa_decode_backend dsv4_attn_backend "
        "dsa_paged_mqa_logits_backend dsa_topk_backend disable_flashinfer_autotune "
        "flashinfer_autotune_skip_ops triton_attention_reduce_in_fp32 triton_attention_num_kv_splits "
        "triton_attention_split_tile_size flashinfer_mla_disable_ragged enable_fused_qk_norm_rope "
        "enable_tf32_matmul mamba_backend mamba_ssm_dtype enable_mamba_cache_stochastic_rounding "
        "mamba_cache_philox_rounds linear_attn_backend linear_attn_decode_backend "
        "linear_attn_prefill_backend moe_runner_backend flashinfer_mxfp4_moe_precision "
        "enable_fused_moe_sum_all_reduce disable_shared_experts_fusion enforce_shared_experts_fusion "
        "disable_flashinfer_cutlass_moe_fp4_allgather",
        _KERNEL,
    ),
    untested(
        "disable_custom_all_reduce enable_mscclpp enable_torch_symm_mem enable_scattered_sconv pre_warm_nccl "
        "boundary_reduction enable_flashinfer_allreduce_fusion enforce_disable_flashinfer_allreduce_fusion "
        "flashinfer_allreduce_fusion_backend enable_aiter_allreduce_fusion "
        "disable_aiter_allreduce_fusion_in_prefill disable_aiter_allreduce_fusion_in_decode moe_a2a_backend "
        "deepep_v2_mode deepep_mode fuseep_mode flashinfer_a2a_dispatch_type deepep_config "
        "enable_two_batch_overlap enable_single_batch_overlap tbo_token_distribution_threshold "
        "enable_dp_attention_local_control_broadcast enable_dp_lm_head enable_tp_lm_head_all_to_all "
        "enable_attn_tp_input_scattered disable_attn_tp_gather enable_p2p_check moe_dense_tp_size",
        _COMMUNICATION,
    ),
    untested(
        "cuda_graph_max_bs_decode cuda_graph_bs_decode disable_cuda_graph_padding "
        "disable_prefill_cuda_graph disable_decode_cuda_graph "
        "cuda_graph_config cuda_graph_backend_decode cuda_graph_backend_prefill cuda_graph_max_bs_prefill "
        "cuda_graph_max_seq_len_prefill cuda_graph_bs_prefill cuda_graph_prefill_max_context "
        "cuda_graph_tc_compiler enable_profile_cuda_graph enable_cudagraph_gc debug_cuda_graph "
        "enable_torch_compile enable_torch_compile_debug_mode torch_compile_max_bs",
        _GRAPHS,
    ),
    untested(
        "disable_priority_preemption schedule_low_priority_values_first num_continuous_decode_steps "
        "gc_threshold swa_full_tokens_ratio "
        "mamba_max_states_per_path mamba_radix_cache_strategy uses_mamba_radix_cache mamba_track_interval "
        "enable_int8_mamba_checkpoint int8_mamba_ckpt_size enable_linear_replayssm "
        "linear_replayssm_cache_len radix_eviction_policy_config enable_page_major_kv_layout "
        "enable_unified_memory "
        "pp_max_micro_batch_size pp_async_batch_depth max_queued_requests prefill_decode_interval "
        "enable_dynamic_chunking prefill_max_requests enable_mixed_chunk abort_on_priority_when_disabled "
        "c128_page_size swa_prefix_tails disable_hybrid_swa_memory disable_chunked_prefix_cache "
        "scheduler_recv_interval max_mamba_cache_size enable_prefill_delayer "
        "prefill_delayer_max_delay_passes prefill_delayer_token_usage_low_watermark "
        "prefill_delayer_forward_passes_buckets prefill_delayer_wait_seconds_buckets "
        "prefill_delayer_queue_min_ratio prefill_delayer_max_delay_ms min_free_slots_delay "
        "detokenizer_worker_num enable_dynamic_batch_tokenizer dynamic_batch_tokenizer_batch_size "
        "dynamic_batch_tokenizer_batch_timeout enable_tokenizer_batch_encode",
        _SCHEDULE,
    ),
    untested(
        "constrained_json_whitespace_pattern constrained_json_disable_any_whitespace "
        "constrained_json_max_whitespace_cnt disable_outlines_disk_cache",
        "this shape of grammars has not been run here",
    ),
    untested(
        "gc_warning_threshold_secs enable_metrics_for_all_schedulers enable_mfu_metrics enable_cache_report "
        "log_requests log_requests_level log_requests_format log_requests_target "
        "uvicorn_access_log_exclude_prefixes crash_dump_folder load_snapshot_publish_interval "
        "tokenizer_metrics_custom_labels_header tokenizer_metrics_allowed_custom_labels extra_metric_labels "
        "bucket_time_to_first_token bucket_inter_token_latency bucket_e2e_request_latency "
        "prompt_tokens_buckets generation_tokens_buckets enable_request_time_stats_logging "
        "enable_forward_pass_metrics forward_pass_metrics_worker_id forward_pass_metrics_ipc_name "
        "enable_trace trace_modules otlp_traces_endpoint otlp_service_name export_metrics_to_file "
        "export_metrics_to_file_dir kv_canary kv_canary_real_data kv_canary_sweep_interval "
        "debug_tensor_dump_output_folder debug_tensor_dump_layers debug_tensor_dump_input_file "
        "enable_layerwise_nvtx_marker",
        _DEBUGGING,
    ),
)
"""Fields of ServerArgs of the policy's engines."""

_JUDGES = table(
    owned("model_path tokenizer_path revision", instead_of("judge.endpoint.path")),
    owned("dtype", instead_of("judge.endpoint.dtype")),
    owned("tp_size", instead_of("judge.endpoint.tensor_parallel")),
    owned("dp_size enable_dp_attention", instead_of("judge.endpoint.count")),
    owned(
        "pp_size ep_size nnodes",
        "Slipstream splits the judge's engines by tensor parallelism only; use "
        "judge.endpoint.tensor_parallel instead",
    ),
    owned("preferred_sampling_params sampling_defaults", instead_of("judge.temperature")),
    owned("weight_version", "the judge's weights have no versions: they never change"),
    owned("stream_interval", "a judge's answer is read as a whole; leave it out"),
    untested(
        "quantization modelopt_quant quantize_and_serve rl_quant_profile quantization_param_path",
        "a judge that the engine quantizes has not been run here",
    ),
    untested(
        "enable_lora max_lora_rank lora_target_modules lora_paths max_loras_per_batch max_loaded_loras "
        "lora_backend",
        "a judge with adapters has not been run here",
    ),
)

JUDGE_FIELDS: Table = {**SGLANG_FIELDS, **_JUDGES}
"""Fields of ServerArgs of a judge's engines: those of the policy's, but for what only the policy has."""

_ONE_COMPLETION = "a request has one completion; rollout.n_samples_per_prompt says how many a prompt has"
_FROM_IDS = "Slipstream reads token ids, and makes the text of them itself"
_INSIDE = "SGLang sets this field itself"
_LOGITS = "rules/rollout.py asks for what corrects the loss"

SAMPLING_FIELDS = table(
    *(
        owned(name, instead_of(f"rollout.sampling.{name}"))
        for name in (
            "temperature",
            "top_p",
            "top_k",
            "max_new_tokens",
            "min_new_tokens",
            "stop",
            "stop_token_ids",
            "ignore_eos",
        )
    ),
    owned("sampling_seed", instead_of("rollout.sampling.seed")),
    owned("stream_interval", instead_of("rollout.engine.stream_interval")),
    owned("n beam_width", _ONE_COMPLETION),
    owned("skip_special_tokens spaces_between_special_tokens no_stop_trim", _FROM_IDS),
    owned(
        "stop_strs stop_regex_strs stop_str_max_len stop_regex_max_len is_normalized ebnf_full_assistant",
        _INSIDE,
    ),
    allowed("min_p frequency_penalty presence_penalty repetition_penalty logit_bias", _LOGITS),
    allowed("json_schema regex ebnf structural_tag", _LOGITS),
    allowed("stop_regex custom_params", "it ends a completion, or is read by code of the user's alone"),
)
"""Fields of SamplingParams."""
