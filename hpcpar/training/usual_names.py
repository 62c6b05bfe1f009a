"""Names that Hugging Face, Megatron, DeepSpeed and Lightning use for the keys of a configuration."""

from __future__ import annotations

_ACCUMULATED = "train.microbatch (what a rank has of train.global_batch beyond it is accumulated)"
_BATCH = (
    "train.global_batch (sequences of a step, over all ranks) or train.microbatch (those at once on a rank)"
)
_STEPS = "train.steps (of the optimizer)"
_WARMUP = "schedule.warmup_fraction (of train.steps)"

ELSEWHERE = {
    "optimizer.learning_rate": "lr learning_rate_init base_lr peak_lr max_lr",
    "optimizer.name": "optim optimizer_type optimizer.type",
    "optimizer.betas": "beta beta1 beta2 adam_beta1 adam_beta2 adam_betas",
    "optimizer.epsilon": "eps adam_eps adam_epsilon",
    "optimizer.weight_decay": "wd adamw_weight_decay",
    "optimizer.momentum": "sgd_momentum",
    "optimizer.clip_norm": "clip_grad clip max_grad_norm grad_clip gradient_clipping gradient_clip_val "
    "clip_grad_norm max_norm",
    "optimizer.zero_stage": "zero stage zero_optimization use_distributed_optimizer fsdp sharding_strategy",
    "optimizer.offload": "offload_optimizer cpu_offload offload_param optimizer_cpu_offload",
    "optimizer.bucket_mib": "reduce_bucket_size allgather_bucket_size bucket_size bucket_cap_mb",
    _WARMUP: "warmup warmup_ratio warmup_steps warmup_iters num_warmup_steps lr_warmup_iters "
    "lr_warmup_fraction lr_warmup_steps",
    "schedule.final_fraction (of optimizer.learning_rate)": "min_lr min_lr_ratio lr_end final_lr eta_min "
    "min_learning_rate",
    "schedule, whose warmup_fraction and final_fraction shape a cosine": "scheduler lr_scheduler "
    "lr_scheduler_type lr_decay_style schedule.name schedule.type",
    _STEPS: "max_steps num_steps total_steps train_steps training_steps iterations max_iters train_iters "
    "iters epochs num_epochs max_epochs num_train_epochs train_epochs train_samples",
    "train.sequence": "seq_len seq_length sequence_length max_seq_len max_seq_length block_size "
    "context_length max_length context seqlen n_ctx ctx_len",
    _BATCH: "batch_size batch train_batch_size bs",
    "train.global_batch": "global_batch_size total_batch_size gbs",
    "train.microbatch": "micro_batch micro_batch_size mbs per_device_train_batch_size device_batch_size "
    "train_micro_batch_size_per_gpu per_device_batch_size micro_batch_size_per_gpu local_batch_size",
    _ACCUMULATED: "gradient_accumulation_steps accumulate_grad_batches grad_accum_steps accumulation_steps "
    "gradient_accumulation grad_accum accumulate num_microbatches",
    "train.precision": "dtype torch_dtype fp16 bf16 mixed_precision params_dtype amp",
    "train.recompute": "gradient_checkpointing activation_checkpointing activation_checkpoint "
    "recompute_activations recompute_granularity checkpoint_activations",
    "train.recompute_layers": "recompute_num_layers",
    "train.evaluate_every": "eval_interval eval_steps eval_every val_check_interval evaluation_strategy "
    "eval_freq val_interval",
    "train.held_out_batches": "eval_iters limit_val_batches eval_batches",
    "train.seed": "random_seed data_seed manual_seed",
    "train.threads": "num_threads omp_num_threads",
    "train.device": "accelerator devices gpus gpu",
    "data.paths": "path data_path data_dir dataset dataset_name train_file train_files train_data files "
    "dataset_path",
    "data.text_key": "text_column text_field json_keys json_key content_key dataset_text_field column",
    "data.eos_token": "eos eos_token_id end_of_document end_token append_eod",
    "data.tokenizer": "tokenizer_path tokenizer_file tokenizer_model tokenizer_name tokenizer_name_or_path",
    "data.held_out": "validation_split val_split split valid_fraction eval_fraction val_fraction",
    "data.cache": "cache_dir data_cache_path",
    "output.directory": "output_dir out_dir save_dir checkpoint_dir default_root_dir logging_dir outdir",
    "output.log_every": "logging_steps log_interval log_every_n_steps log_freq steps_per_print",
    "output.checkpoint_every (steps) or output.checkpoint_minutes": "save_steps save_interval save_every "
    "every_n_train_steps checkpoint_interval save_freq ckpt_every checkpoint_steps",
    "output.keep": "save_total_limit save_top_k keep_last max_checkpoints",
    "mesh.tp": "tensor_parallel_size tensor_model_parallel_size tp_size tp_degree",
    "mesh.pp": "pipeline_parallel_size pipeline_model_parallel_size pp_size pipeline_stages pp_degree",
    "mesh.cp": "context_parallel_size cp_size cp_degree sequence_parallel_size sp_size ulysses_degree",
    "context_parallel.method": "cp_comm_type",
    "data.pack_documents": "packing pack_sequences reset_attention_mask sample_packing",
    "mesh.dp": "data_parallel_size dp_size world_size dp_degree",
    "the option --resume": "resume resume_from_checkpoint load ckpt_path auto_resume",
    "model.preset": "model_name model_type model.name model.type model.size",
    "model.hugging_face": "model_name_or_path model.path model.from model.init_from from_pretrained "
    "pretrained_model_name_or_path hf_model hf_checkpoint",
    "model.layers": "num_layers n_layers n_layer num_hidden_layers depth",
    "model.hidden_size": "d_model n_embd dim hidden hidden_dim",
    "model.heads": "num_attention_heads n_head n_heads num_heads",
    "model.kv_heads": "num_key_value_heads n_kv_heads num_query_groups num_kv_heads",
    "model.ffn_size": "intermediate_size ffn_hidden_size d_ff",
    "model.head_size": "head_dim kv_channels",
    "model.max_sequence": "max_position_embeddings",
    "model.norm_epsilon": "rms_norm_eps layernorm_epsilon norm_eps",
    "model.rope_theta": "rotary_base rope_base",
    "model.tie_embeddings": "tie_word_embeddings",
    "model.initial_std": "initializer_range init_method_std init_std",
    "model.dropout": "hidden_dropout attention_dropout",
    "model.experts.count": "num_experts num_local_experts n_routed_experts num_moe_experts moe_num_experts",
    "model.experts.per_token": "num_experts_per_tok moe_router_topk moe_top_k experts_per_token",
    "model.experts.ffn_size": "moe_intermediate_size moe_ffn_hidden_size expert_ffn_size",
    "model.experts.shared_ffn_size": "n_shared_experts moe_shared_expert_intermediate_size "
    "shared_expert_intermediate_size",
    "model.experts.first_dense": "first_k_dense_replace moe_layer_freq",
    "model.experts.score": "scoring_func moe_router_score_function",
    "model.experts.renormalise": "norm_topk_prob",
    "model.experts.scale": "routed_scaling_factor moe_router_topk_scaling_factor",
    "model.experts.groups": "n_group moe_router_num_groups",
    "model.experts.groups_per_token": "topk_group moe_router_group_topk",
    "model.experts.capacity_factor": "moe_expert_capacity_factor",
    "model.experts.drop": "moe_token_drop_policy",
    "model.experts.balance_loss": "router_aux_loss_coef aux_loss_coef moe_aux_loss_coeff aux_loss_alpha",
    "model.experts.z_loss": "router_z_loss_coef moe_z_loss_coeff",
    "model.experts.bias_rate": "moe_router_bias_update_rate bias_update_speed",
}
"""key, as suggested to the user -> its names elsewhere; those with a dot only in that table."""

OF_OTHERS = {name: key for key, names in ELSEWHERE.items() for name in names.split()}
