"""Declarations of llama.h, mtmd.h and ggml's headers for ctypes: structures, callbacks and functions.

Written by scripts/declarations.py from llama.cpp's source in llama-cpp-python 0.3.36. Do not edit.
"""

from __future__ import annotations

from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    c_bool,
    c_char_p,
    c_float,
    c_int,
    c_int8,
    c_int32,
    c_int64,
    c_size_t,
    c_uint8,
    c_uint32,
    c_uint64,
    c_void_p,
)
from typing import Any


class ggml_init_params(Structure):
    _fields_ = (
        ("mem_size", c_size_t),
        ("mem_buffer", c_void_p),
        ("no_alloc", c_bool),
    )


class ggml_threadpool_params(Structure):
    _fields_ = (
        ("cpumask", c_bool * 512),
        ("n_threads", c_int),
        ("prio", c_int),
        ("poll", c_uint32),
        ("strict_cpu", c_bool),
        ("paused", c_bool),
    )


class llama_batch(Structure):
    _fields_ = (
        ("n_tokens", c_int32),
        ("token", POINTER(c_int32)),
        ("embd", POINTER(c_float)),
        ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)),
        ("seq_id", POINTER(POINTER(c_int32))),
        ("logits", POINTER(c_int8)),
    )


class llama_logit_bias(Structure):
    _fields_ = (
        ("token", c_int32),
        ("bias", c_float),
    )


class llama_model_tensor_buft_override(Structure):
    _fields_ = (
        ("pattern", c_char_p),
        ("buft", c_void_p),
    )


class llama_token_data(Structure):
    _fields_ = (
        ("id", c_int32),
        ("logit", c_float),
        ("p", c_float),
    )


class llama_token_data_array(Structure):
    _fields_ = (
        ("data", POINTER(llama_token_data)),
        ("size", c_size_t),
        ("selected", c_int64),
        ("sorted", c_bool),
    )


class mtmd_decoder_pos(Structure):
    _fields_ = (
        ("t", c_uint32),
        ("x", c_uint32),
        ("y", c_uint32),
        ("z", c_uint32),
    )


class mtmd_input_text(Structure):
    _fields_ = (
        ("text", c_char_p),
        ("text_len", c_size_t),
        ("add_special", c_bool),
        ("parse_special", c_bool),
    )


class mtmd_input_part(Structure):
    _fields_ = (
        ("text", POINTER(mtmd_input_text)),
        ("bitmap", c_void_p),
    )


ggml_abort_callback = CFUNCTYPE(c_bool, c_void_p)
ggml_backend_dev_get_extra_bufts_t = CFUNCTYPE(POINTER(c_void_p), c_void_p)
ggml_backend_set_n_threads_t = CFUNCTYPE(None, c_void_p, c_int)
ggml_log_callback = CFUNCTYPE(None, c_int, c_char_p, c_void_p)
llama_progress_callback = CFUNCTYPE(c_bool, c_float, c_void_p)
ggml_backend_sched_eval_callback = CFUNCTYPE(c_bool, c_void_p, c_bool, c_void_p)


class llama_context_params(Structure):
    _fields_ = (
        ("n_ctx", c_uint32),
        ("n_batch", c_uint32),
        ("n_ubatch", c_uint32),
        ("n_seq_max", c_uint32),
        ("n_rs_seq", c_uint32),
        ("n_outputs_max", c_uint32),
        ("n_outputs_max_per_seq", c_uint32),
        ("n_threads", c_int32),
        ("n_threads_batch", c_int32),
        ("ctx_type", c_int),
        ("rope_scaling_type", c_int),
        ("pooling_type", c_int),
        ("attention_type", c_int),
        ("flash_attn_type", c_int),
        ("rope_freq_base", c_float),
        ("rope_freq_scale", c_float),
        ("yarn_ext_factor", c_float),
        ("yarn_attn_factor", c_float),
        ("yarn_beta_fast", c_float),
        ("yarn_beta_slow", c_float),
        ("yarn_orig_ctx", c_uint32),
        ("defrag_thold", c_float),
        ("cb_eval", ggml_backend_sched_eval_callback),
        ("cb_eval_user_data", c_void_p),
        ("type_k", c_int),
        ("type_v", c_int),
        ("abort_callback", ggml_abort_callback),
        ("abort_callback_data", c_void_p),
        ("embeddings", c_bool),
        ("offload_kqv", c_bool),
        ("no_perf", c_bool),
        ("op_offload", c_bool),
        ("swa_full", c_bool),
        ("kv_unified", c_bool),
        ("samplers", c_void_p),
        ("n_samplers", c_size_t),
        ("ctx_other", c_void_p),
    )


class llama_model_params(Structure):
    _fields_ = (
        ("devices", POINTER(c_void_p)),
        ("tensor_buft_overrides", POINTER(llama_model_tensor_buft_override)),
        ("n_gpu_layers", c_int32),
        ("split_mode", c_int),
        ("load_mode", c_int),
        ("lazy_mode", c_int),
        ("main_gpu", c_int32),
        ("tensor_split", POINTER(c_float)),
        ("progress_callback", llama_progress_callback),
        ("progress_callback_user_data", c_void_p),
        ("kv_overrides", c_void_p),
        ("vocab_only", c_bool),
        ("check_tensors", c_bool),
        ("use_extra_bufts", c_bool),
        ("no_host", c_bool),
        ("no_alloc", c_bool),
        ("load_mtp", c_bool),
    )


class llama_model_quantize_params(Structure):
    _fields_ = (
        ("nthread", c_int32),
        ("ftype", c_int),
        ("output_tensor_type", c_int),
        ("token_embedding_type", c_int),
        ("allow_requantize", c_bool),
        ("quantize_output_tensor", c_bool),
        ("only_copy", c_bool),
        ("pure", c_bool),
        ("keep_split", c_bool),
        ("dry_run", c_bool),
        ("imatrix", c_void_p),
        ("kv_overrides", c_void_p),
        ("tt_overrides", c_void_p),
        ("prune_layers", POINTER(c_int32)),
        ("max_buf_size", c_size_t),
    )


class llama_sampler_chain_params(Structure):
    _fields_ = (("no_perf", c_bool),)


mtmd_progress_callback = CFUNCTYPE(c_bool, c_float, c_void_p)


class mtmd_context_params(Structure):
    _fields_ = (
        ("use_gpu", c_bool),
        ("device", c_void_p),
        ("print_timings", c_bool),
        ("n_threads", c_int),
        ("image_marker", c_char_p),
        ("media_marker", c_char_p),
        ("flash_attn_type", c_int),
        ("warmup", c_bool),
        ("image_min_tokens", c_int),
        ("image_max_tokens", c_int),
        ("cb_eval", ggml_backend_sched_eval_callback),
        ("cb_eval_user_data", c_void_p),
        ("batch_max_tokens", c_int32),
        ("progress_callback", mtmd_progress_callback),
        ("progress_callback_user_data", c_void_p),
    )


# Result and parameters of each.
FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "ggml_backend_alloc_ctx_tensors_from_buft": (c_void_p, c_void_p, c_void_p),
    "ggml_backend_buft_get_device": (c_void_p, c_void_p),
    "ggml_backend_buft_is_host": (c_bool, c_void_p),
    "ggml_backend_cpu_buffer_type": (c_void_p,),
    "ggml_backend_dev_count": (c_size_t,),
    "ggml_backend_dev_description": (c_char_p, c_void_p),
    "ggml_backend_dev_get": (c_void_p, c_size_t),
    "ggml_backend_dev_init": (c_void_p, c_void_p, c_char_p),
    "ggml_backend_dev_memory": (None, c_void_p, POINTER(c_size_t), POINTER(c_size_t)),
    "ggml_backend_dev_name": (c_char_p, c_void_p),
    "ggml_backend_dev_supports_op": (c_bool, c_void_p, c_void_p),
    "ggml_backend_dev_type": (c_int, c_void_p),
    "ggml_backend_graph_compute": (c_int, c_void_p, c_void_p),
    "ggml_backend_load": (c_void_p, c_char_p),
    "ggml_backend_load_all_from_path": (None, c_char_p),
    "ggml_backend_reg_by_name": (c_void_p, c_char_p),
    "ggml_backend_reg_dev_count": (c_size_t, c_void_p),
    "ggml_backend_reg_dev_get": (c_void_p, c_void_p, c_size_t),
    "ggml_backend_reg_get_proc_address": (c_void_p, c_void_p, c_char_p),
    "ggml_backend_tensor_set": (None, c_void_p, c_void_p, c_size_t, c_size_t),
    "ggml_build_forward_expand": (None, c_void_p, c_void_p),
    "ggml_init": (c_void_p, ggml_init_params),
    "ggml_mul_mat": (c_void_p, c_void_p, c_void_p, c_void_p),
    "ggml_nbytes": (c_size_t, c_void_p),
    "ggml_new_graph": (c_void_p, c_void_p),
    "ggml_new_tensor_2d": (c_void_p, c_void_p, c_int, c_int64, c_int64),
    "ggml_threadpool_params_init": (None, POINTER(ggml_threadpool_params), c_int),
    "llama_adapter_lora_free": (None, c_void_p),
    "llama_adapter_lora_init": (c_void_p, c_void_p, c_char_p),
    "llama_attach_threadpool": (None, c_void_p, c_void_p, c_void_p),
    "llama_backend_init": (None,),
    "llama_batch_get_one": (llama_batch, POINTER(c_int32), c_int32),
    "llama_context_default_params": (llama_context_params,),
    "llama_decode": (c_int32, c_void_p, llama_batch),
    "llama_free": (None, c_void_p),
    "llama_get_embeddings_ith": (POINTER(c_float), c_void_p, c_int32),
    "llama_get_embeddings_seq": (POINTER(c_float), c_void_p, c_int32),
    "llama_get_logits": (POINTER(c_float), c_void_p),
    "llama_get_memory": (c_void_p, c_void_p),
    "llama_init_from_model": (c_void_p, c_void_p, llama_context_params),
    "llama_log_set": (None, ggml_log_callback, c_void_p),
    "llama_max_devices": (c_size_t,),
    "llama_memory_clear": (None, c_void_p, c_bool),
    "llama_memory_seq_cp": (None, c_void_p, c_int32, c_int32, c_int32, c_int32),
    "llama_memory_seq_pos_max": (c_int32, c_void_p, c_int32),
    "llama_memory_seq_pos_min": (c_int32, c_void_p, c_int32),
    "llama_memory_seq_rm": (c_bool, c_void_p, c_int32, c_int32, c_int32),
    "llama_model_chat_template": (c_char_p, c_void_p, c_char_p),
    "llama_model_default_params": (llama_model_params,),
    "llama_model_desc": (c_int32, c_void_p, c_char_p, c_size_t),
    "llama_model_free": (None, c_void_p),
    "llama_model_get_vocab": (c_void_p, c_void_p),
    "llama_model_has_decoder": (c_bool, c_void_p),
    "llama_model_is_hybrid": (c_bool, c_void_p),
    "llama_model_is_recurrent": (c_bool, c_void_p),
    "llama_model_load_from_file": (c_void_p, c_char_p, llama_model_params),
    "llama_model_meta_val_str": (c_int32, c_void_p, c_char_p, c_char_p, c_size_t),
    "llama_model_n_cls_out": (c_uint32, c_void_p),
    "llama_model_n_ctx_train": (c_int32, c_void_p),
    "llama_model_n_embd": (c_int32, c_void_p),
    "llama_model_n_embd_inp": (c_int32, c_void_p),
    "llama_model_n_embd_out": (c_int32, c_void_p),
    "llama_model_n_layer": (c_int32, c_void_p),
    "llama_model_n_params": (c_uint64, c_void_p),
    "llama_model_n_swa": (c_int32, c_void_p),
    "llama_model_quantize": (c_uint32, c_char_p, c_char_p, c_void_p),
    "llama_model_quantize_default_params": (llama_model_quantize_params,),
    "llama_model_rope_type": (c_int, c_void_p),
    "llama_model_size": (c_uint64, c_void_p),
    "llama_n_batch": (c_uint32, c_void_p),
    "llama_n_ctx": (c_uint32, c_void_p),
    "llama_n_ctx_seq": (c_uint32, c_void_p),
    "llama_n_rs_seq": (c_uint32, c_void_p),
    "llama_n_threads": (c_int32, c_void_p),
    "llama_n_ubatch": (c_uint32, c_void_p),
    "llama_print_system_info": (c_char_p,),
    "llama_sampler_accept": (None, c_void_p, c_int32),
    "llama_sampler_apply": (None, c_void_p, POINTER(llama_token_data_array)),
    "llama_sampler_chain_add": (None, c_void_p, c_void_p),
    "llama_sampler_chain_default_params": (llama_sampler_chain_params,),
    "llama_sampler_chain_get": (c_void_p, c_void_p, c_int32),
    "llama_sampler_chain_init": (c_void_p, llama_sampler_chain_params),
    "llama_sampler_chain_n": (c_int32, c_void_p),
    "llama_sampler_clone": (c_void_p, c_void_p),
    "llama_sampler_free": (None, c_void_p),
    "llama_sampler_init_adaptive_p": (c_void_p, c_float, c_float, c_uint32),
    "llama_sampler_init_dist": (c_void_p, c_uint32),
    "llama_sampler_init_dry": (
        c_void_p,
        c_void_p,
        c_float,
        c_float,
        c_int32,
        c_int32,
        POINTER(c_char_p),
        c_size_t,
    ),
    "llama_sampler_init_greedy": (c_void_p,),
    "llama_sampler_init_logit_bias": (c_void_p, c_int32, c_int32, POINTER(llama_logit_bias)),
    "llama_sampler_init_min_p": (c_void_p, c_float, c_size_t),
    "llama_sampler_init_mirostat": (c_void_p, c_int32, c_uint32, c_float, c_float, c_int32),
    "llama_sampler_init_mirostat_v2": (c_void_p, c_uint32, c_float, c_float),
    "llama_sampler_init_penalties": (c_void_p, c_int32, c_int32, c_float, c_float, c_float),
    "llama_sampler_init_temp": (c_void_p, c_float),
    "llama_sampler_init_temp_ext": (c_void_p, c_float, c_float, c_float),
    "llama_sampler_init_top_k": (c_void_p, c_int32),
    "llama_sampler_init_top_n_sigma": (c_void_p, c_float),
    "llama_sampler_init_top_p": (c_void_p, c_float, c_size_t),
    "llama_sampler_init_typical": (c_void_p, c_float, c_size_t),
    "llama_sampler_init_xtc": (c_void_p, c_float, c_float, c_size_t, c_uint32),
    "llama_set_abort_callback": (None, c_void_p, ggml_abort_callback, c_void_p),
    "llama_set_adapters_lora": (c_int32, c_void_p, POINTER(c_void_p), c_size_t, POINTER(c_float)),
    "llama_set_causal_attn": (None, c_void_p, c_bool),
    "llama_set_n_threads": (None, c_void_p, c_int32, c_int32),
    "llama_state_seq_get_data_ext": (c_size_t, c_void_p, POINTER(c_uint8), c_size_t, c_int32, c_uint32),
    "llama_state_seq_get_size_ext": (c_size_t, c_void_p, c_int32, c_uint32),
    "llama_state_seq_set_data_ext": (c_size_t, c_void_p, POINTER(c_uint8), c_size_t, c_int32, c_uint32),
    "llama_supports_gpu_offload": (c_bool,),
    "llama_synchronize": (None, c_void_p),
    "llama_token_to_piece": (c_int32, c_void_p, c_int32, c_char_p, c_int32, c_int32, c_bool),
    "llama_tokenize": (c_int32, c_void_p, c_char_p, c_int32, POINTER(c_int32), c_int32, c_bool, c_bool),
    "llama_vocab_bos": (c_int32, c_void_p),
    "llama_vocab_eos": (c_int32, c_void_p),
    "llama_vocab_fim_mid": (c_int32, c_void_p),
    "llama_vocab_fim_pre": (c_int32, c_void_p),
    "llama_vocab_fim_rep": (c_int32, c_void_p),
    "llama_vocab_fim_sep": (c_int32, c_void_p),
    "llama_vocab_fim_suf": (c_int32, c_void_p),
    "llama_vocab_get_add_bos": (c_bool, c_void_p),
    "llama_vocab_get_add_eos": (c_bool, c_void_p),
    "llama_vocab_get_add_sep": (c_bool, c_void_p),
    "llama_vocab_get_attr": (c_int, c_void_p, c_int32),
    "llama_vocab_get_text": (c_char_p, c_void_p, c_int32),
    "llama_vocab_is_eog": (c_bool, c_void_p, c_int32),
    "llama_vocab_n_tokens": (c_int32, c_void_p),
    "llama_vocab_sep": (c_int32, c_void_p),
}
# The same, of the CPU's backend, which hands them out by their names.
CPU_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "ggml_backend_cpu_set_threadpool": (None, c_void_p, c_void_p),
    "ggml_threadpool_free": (None, c_void_p),
    "ggml_threadpool_new": (c_void_p, POINTER(ggml_threadpool_params)),
}
# The same, of libmtmd, which is loaded for models that take media.
MEDIA_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "mtmd_batch_add_chunk": (c_int32, c_void_p, c_void_p),
    "mtmd_batch_encode": (c_int32, c_void_p),
    "mtmd_batch_free": (None, c_void_p),
    "mtmd_batch_get_output_embd": (POINTER(c_float), c_void_p, c_void_p),
    "mtmd_batch_init": (c_void_p, c_void_p),
    "mtmd_bitmap_free": (None, c_void_p),
    "mtmd_bitmap_init": (c_void_p, c_uint32, c_uint32, POINTER(c_uint8)),
    "mtmd_bitmap_init_from_audio": (c_void_p, c_size_t, POINTER(c_float)),
    "mtmd_bitmap_set_id": (None, c_void_p, c_char_p),
    "mtmd_context_params_default": (mtmd_context_params,),
    "mtmd_decode_use_mrope": (c_bool, c_void_p),
    "mtmd_decode_use_non_causal": (c_bool, c_void_p, c_void_p),
    "mtmd_free": (None, c_void_p),
    "mtmd_get_audio_sample_rate": (c_int, c_void_p),
    "mtmd_helper_eval_chunks": (
        c_int32,
        c_void_p,
        c_void_p,
        c_void_p,
        c_int32,
        c_int32,
        c_int32,
        c_bool,
        POINTER(c_int32),
    ),
    "mtmd_helper_image_get_decoder_pos": (None, c_void_p, c_int32, POINTER(mtmd_decoder_pos)),
    "mtmd_helper_log_set": (None, ggml_log_callback, c_void_p),
    "mtmd_init_from_file": (c_void_p, c_char_p, c_void_p, mtmd_context_params),
    "mtmd_input_chunk_get_id": (c_char_p, c_void_p),
    "mtmd_input_chunk_get_n_pos": (c_int32, c_void_p),
    "mtmd_input_chunk_get_n_tokens": (c_size_t, c_void_p),
    "mtmd_input_chunk_get_tokens_image": (c_void_p, c_void_p),
    "mtmd_input_chunk_get_tokens_text": (POINTER(c_int32), c_void_p, POINTER(c_size_t)),
    "mtmd_input_chunk_get_type": (c_int, c_void_p),
    "mtmd_input_chunks_free": (None, c_void_p),
    "mtmd_input_chunks_get": (c_void_p, c_void_p, c_size_t),
    "mtmd_input_chunks_init": (c_void_p,),
    "mtmd_input_chunks_size": (c_size_t, c_void_p),
    "mtmd_support_vision": (c_bool, c_void_p),
    "mtmd_tokenize_from_parts": (
        c_int32,
        c_void_p,
        c_void_p,
        POINTER(POINTER(mtmd_input_part)),
        c_size_t,
        c_bool,
    ),
}
