"""Every kind of causal decoder in Transformers, small: those whose states hiddenq stores, and those that it refuses.

Invariant: a kind that Transformers maps to a causal model stands in one of the tables, itself or as the wrapper of a
decoder that does, so a kind that a new version brings is noticed, and shown to work or not before it is promised.
"""

from __future__ import annotations

from typing import Any

VOCAB_SIZE = 512
HIDDEN_SIZE = 64
NUM_LAYERS = 4

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": HIDDEN_SIZE, "intermediate_size": 96, "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "n_embd": HIDDEN_SIZE, "n_layer": NUM_LAYERS, "n_head": 4, "n_inner": 96, "d_model": HIDDEN_SIZE,
    "n_layers": NUM_LAYERS, "n_heads": 4, "num_layers": NUM_LAYERS, "ffn_dim": 96, "ffn_hidden_size": 96,
    "max_position_embeddings": 512, "n_positions": 512, "n_ctx": 512, "max_seq_len": 512,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "top_k_experts": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1,
    "shared_expert_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32, "expert_ffn_hidden_size": 32,
    "n_shared_experts": 1, "first_k_dense_replace": 1,
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_expand": 2, "mamba_n_groups": 1,
    "mamba_d_conv": 4, "mamba_dt_rank": 4, "mamba_chunk_size": 16, "mamba_num_heads": 8, "mamba_head_dim": 16,
    "ssm_state_size": 16, "state_size": 16, "num_heads": 8, "chunk_size": 16, "n_groups": 1, "expand": 2,
    "index_topk": 8, "index_head_dim": 16, "index_n_heads": 16, "time_step_rank": 4,
    "attention_dropout": 0.0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
"""Tiny values for the names that configs use; a config takes those that it knows. Sparse attention needs many index
heads: with few, whole sets of keys score exactly 0, and which of them are among the best is the sort's choice."""

_WINDOW = {"sliding_window": 16}
_DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_SECTIONS = _DEFAULT_ROPE | {"mrope_section": [2, 3, 3]}
_MROPE = {"rope_parameters": _SECTIONS}
_ALL_HEADS = {"num_key_value_heads": 4}
_VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
_ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"] * 2}
_LINEAR = {"layer_types": ["linear_attention", "full_attention"] * 2}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    # dense
    "apertus": {}, "apertus1p5_text": {}, "arcee": {}, "biogpt": {}, "bitnet": {}, "bloom": {},
    "codegen": {"rotary_dim": 8}, "cohere": {}, "cohere2": _WINDOW,
    "cohere_compass_text": _WINDOW | _ALTERNATING | {
        "rope_parameters": {"full_attention": _SECTIONS, "sliding_attention": _SECTIONS}
    },
    "cosmos3_edge_text": _MROPE, "ctrl": {"dff": 96}, "cwm": _WINDOW, "diffllama": {}, "doge": {}, "ernie4_5": {},
    "exaone": {}, "exaone4": {"sliding_window": 16, "sliding_window_pattern": 4}, "falcon": {"head_dim": None},
    "gemma": {}, "gemma2": _WINDOW, "gemma3_text": _WINDOW, "gemma4_unified_text": _WINDOW,
    "git": {"vision_config": _VISION}, "glm": {}, "glm4": {}, "glm4v_text": _MROPE, "glm_ocr_text": _MROPE, "gpt2": {},
    "gpt-sw3": {}, "gpt_bigcode": {}, "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 16},
    "gpt_neox": {}, "gpt_neox_japanese": {}, "gptj": {"rotary_dim": 8}, "granite": {}, "granite_docling_text": {},
    "granite_swa": _WINDOW, "helium": {}, "hunyuan_v1_dense": {}, "hunyuan_vl_text": _MROPE, "hyperclovax": {},
    "internlm3": {}, "iquestcoder": {}, "jais2": {}, "llama": {}, "minicpm3": {}, "ministral": _WINDOW,
    "ministral3": {}, "mistral": _WINDOW, "modernbert-decoder": {}, "molmo2_text": {}, "moshi": {}, "mpt": {},
    "muse_glimmer_text": {}, "nanochat": {}, "nemotron": {}, "olmo": {}, "olmo2": {}, "olmo3": _WINDOW,
    "openai-gpt": {}, "opt": {"word_embed_proj_dim": HIDDEN_SIZE}, "persimmon": {}, "phi": {}, "phi3": {},
    "phi4_multimodal": {
        "vision_config": _VISION | {"crop_size": 28},
        "audio_config": {
            "hidden_size": 32, "intermediate_size": 48, "num_blocks": 1, "num_attention_heads": 2,
            "ext_pw_out_channel": 32, "nemo_conv_channels": 32,
        },
    },
    "qwen2": {}, "qwen2_5_vl_text": _MROPE, "qwen2_vl_text": _MROPE, "qwen3": {}, "qwen3_vl_text": _MROPE,
    "seed_oss": {}, "smollm3": {}, "stablelm": {}, "starcoder2": {}, "vaultgemma": _WINDOW, "xglm": {}, "youtu": {},
    # experts
    "afmoe": {}, "aria_text": {}, "axk1": {}, "axk2": _ALL_HEADS, "beam": {}, "cohere2_moe": _WINDOW,
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": HIDDEN_SIZE, "ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {}, "deepseek_v3": {}, "deepseek_v32": _ALL_HEADS, "dots1": {},
    "dots3_note_text": _ALL_HEADS | _WINDOW | {
        "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "shared_experts_intermediate_size": 32,
        "layer_types": ["indexed_attention", "sliding_attention"] * 2,
    },
    "ernie4_5_moe": {"moe_k": 2}, "exaone_moe": _WINDOW, "flex_olmo": {}, "flint": {},
    "gemma4_text": _WINDOW | {
        "vocab_size_per_layer_input": VOCAB_SIZE, "hidden_size_per_layer_input": 16, "enable_moe_block": True
    },
    "glm4_moe": {}, "glm4_moe_lite": {}, "glm_moe_dsa": _ALL_HEADS, "gpt_oss": _WINDOW, "granitemoe": {},
    "granitemoe_swa": _WINDOW, "granitemoeshared": {}, "hunyuan_v1_moe": {}, "hy_v3": {},
    "inkling_text": {
        "sliding_window_size": 16, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16,
        "rel_extent": 32, "local_layer_ids": [0, 2],
    },
    "jetmoe": {}, "kolibri1": _WINDOW | {"num_local_experts": 4}, "laguna": _WINDOW,
    "llama4_text": {"attention_chunk_size": 16}, "longcat_flash": {"head_dim": 8},
    "mellum": _WINDOW | _ALTERNATING | {"num_experts": 4}, "mimo_v2_flash": _WINDOW, "minimax": {}, "minimax_m2": {},
    "minimax_m3_vl_text": {
        "index_block_size": 4, "index_topk_blocks": 2, "dense_intermediate_size": 96, "shared_intermediate_size": 32,
        "rotary_dim": 8,
    },
    "mistral4": {}, "mistral_large4_text": _ALL_HEADS, "mixtral": {}, "muse_spark_text": {}, "olmoe": {}, "phimoe": {},
    "qwen2_moe": {}, "qwen3_moe": {"num_experts": 4}, "qwen3_vl_moe_text": _MROPE, "sarvam_mla": {}, "sarvam_moe": {},
    "solar_open": {}, "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
    # hybrids and state spaces
    "bailing_hybrid": _ALL_HEADS | {"layer_group_size": 2, "num_local_experts": 8, "n_group": 2}, "bamba": {},
    "falcon_h1": {"mamba_d_ssm": 128}, "falcon_mamba": {}, "granitemoehybrid": {}, "jamba": {},
    "kimi_linear": _ALL_HEADS | _LINEAR | {"linear_head_dim": 16, "linear_num_heads": 4, "num_local_experts": 8},
    "lara_mini": {}, "lfm2": {}, "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2}, "lfm3": {}, "mamba": {},
    "mamba2": {}, "nemotron_h": {}, "olmo_hybrid": {}, "qwen3_5_moe_text": {}, "qwen3_5_text": {}, "qwen3_next": {},
    "recurrent_gemma": {}, "xlstm": {"v_head_dim": None}, "zamba": {"layers_block_type": ["mamba", "hybrid"] * 2},
    "zamba2": _ALL_HEADS | {"layers_block_type": ["mamba", "hybrid"] * 2, "n_mamba_heads": 8},
}  # fmt: skip
"""Model types whose states hiddenq stores, with what their configs need beyond `SIZES`."""

_NOT_CAUSAL = r"it is not causal, a token's states change with the tokens after it"
_STREAMS = r"a layer returns several streams, shape \[.*\]; hiddenq stores one \[B, S, H\] stream a layer"
_MIXED_AT_THE_END = r"no norm takes the last layer's output and gives last_hidden_state"
_LOOPS = r"layers were called in the order \[0, 1, 2, 3, 0, 1, 2, 3"
_BLT = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2,
    "intermediate_size": 96, "vocab_size": VOCAB_SIZE, "max_position_embeddings": 512, "hidden_size_global": 64,
}  # fmt: skip
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    # read in both directions, as long as their configs do not say `is_decoder`
    **dict.fromkeys(
        ["bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert",
         "rembert", "roberta", "roberta-prelayernorm", "roformer", "xlm-roberta", "xlm-roberta-xl"],
        (_NOT_CAUSAL, {}),
    ),
    "roc_bert": (_NOT_CAUSAL, {"shape_vocab_size": 64, "pronunciation_vocab_size": 64}),
    "xlm": (_NOT_CAUSAL, {"emb_dim": HIDDEN_SIZE, "n_words": VOCAB_SIZE, "n_heads": 4}),
    # hyper-connections, alternating updates, residuals between blocks: no single stream between layers
    "deepseek_v4": (_STREAMS, _WINDOW),
    "gemma3n_text": (
        _STREAMS,
        {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": VOCAB_SIZE, "hidden_size_per_layer_input": 16},
    ),
    "hy_v4": (_STREAMS, {}),
    "inkling2_loop_text": (_MIXED_AT_THE_END, {}),
    "inkling2_text": (_MIXED_AT_THE_END, {}),
    "qwen4_exp_text": (
        _MIXED_AT_THE_END,
        {"rope_parameters": _DEFAULT_ROPE, "hc_lowrank": 16, "indexer_n_heads": 2, "indexer_kv_heads": 1,
         "indexer_head_dim": 16, "indexer_budget": 8, "indexer_compress_ratio": 2},
    ),
    "reformer": (_MIXED_AT_THE_END, {"is_decoder": True, "axial_pos_embds": False, "attention_head_size": 16,
                                     "attn_layers": ["local"] * 4, "feed_forward_size": 96}),
    # layers that run more than once
    "dory": (_LOOPS, {}),
    "hrm_text": (_LOOPS, {}),
    # states that are not a row for each token, or not those reported
    "blt": (
        r"a layer returns shape \[2, 13, 64\] for input \[2, 12\]",
        {"patcher_config": _BLT, "encoder_config": _BLT, "decoder_config": _BLT, "global_config": _BLT,
         "encoder_hash_byte_group_vocab": 100},
    ),
    "cpmant": (r"a layer returns shape \[2, 44, 64\] for input \[2, 12\]", {}),
    "rwkv": (r"the outputs of its 4 layers are not the 5 hidden_states reported", {"rescale_every": 2}),
    "xlnet": (r"a layer returns shape \[12, 2, 64\] for input \[2, 12\]",
              {"max_position_embeddings": None, "d_inner": 96, "attn_type": "uni"}),
    "xmod": (r"it does not run on token ids alone: ValueError: Input language unknown", {}),
}  # fmt: skip
"""Model types that are refused once they are loaded: with what line, and what their configs need beyond `SIZES`."""

_MUSIC = {
    "text_encoder": {"model_type": "t5"}, "audio_encoder": {"model_type": "encodec"},
    "decoder": {"model_type": "musicgen_decoder"},
}  # fmt: skip
ENCODER_DECODERS: dict[str, dict[str, Any]] = {
    "bart": {}, "bigbird_pegasus": {}, "blenderbot": {}, "blenderbot-small": {}, "marian": {}, "mbart": {}, "mvp": {},
    "pegasus": {}, "plbart": {}, "prophetnet": {}, "whisper": {}, "musicgen": _MUSIC,
    "musicgen_melody": _MUSIC | {"decoder": {"model_type": "musicgen_melody_decoder"}},
}  # fmt: skip
"""Model types whose configs say that they have an encoder, with what such a config must hold."""

NO_DECODER_OF_THEIR_OWN = (
    "emu3_text_model", "gemma4_assistant", "gemma4_unified_assistant", "mllama_text_model", "trocr",
)  # fmt: skip
"""Transformers has no model without a head for these (`AutoModel` does not know them), as for some wrapped decoders."""

WRAPPERS = {
    "gemma3": "gemma3_text", "internvl": "qwen2", "llava": "llama", "mistral3": "mistral",
    "qwen2_5_vl": "qwen2_5_vl_text", "qwen3_5": "qwen3_5_text", "qwen3_vl": "qwen3_vl_text",
}  # fmt: skip
"""Wrappers of a decoder, the popular ones, each tried with tied and untied embeddings, and its decoder's type."""
MORE_WRAPPERS = {
    "aya_vision": "cohere2", "blip-2": "opt", "exaone4_5": "exaone4", "fuyu": "persimmon", "gemma4": "gemma4_text",
    "glm4v": "glm4v_text", "idefics3": "llama", "lfm2_vl": "lfm2",
    "llava_onevision": "qwen2", "paligemma": "gemma", "qwen2_vl": "qwen2_vl_text", "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text", "smolvlm": "llama", "video_llama_3": "qwen2",
}  # fmt: skip
"""More of them, untied."""
