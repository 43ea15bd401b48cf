"""Small transformers models from their configurations, with random weights."""

# ruff: noqa: E501
from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn
from zoo_base import PIXELS, VOCABULARY, Call, Zoo, free, pictures, sound, words, zoo

# Sizes under the names that configurations use; each takes the ones it knows.
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 128,
    "initializer_range": 0.125,
    "num_labels": 5,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
IDS, TYPES, BOTH = (
    ("input_ids", "attention_mask"),
    ("input_ids", "attention_mask", "token_type_ids"),
    ("input_ids", "attention_mask", "decoder_input_ids"),
)
GQA = {"num_key_value_heads": 2, "head_dim": 16, "use_cache": False}
SEQ2SEQ = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 128,
           "decoder_ffn_dim": 128, "init_std": 0.125, "use_cache": False, "decoder_start_token_id": 2}  # fmt: skip
STAGES = {"depths": [1, 1, 1, 1], "image_size": PIXELS, "num_channels": 3}
T5 = {
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "num_layers": 2,
    "num_heads": 4,
    "use_cache": False,
    "decoder_start_token_id": 2,
}
WAVE = {"conv_dim": [32, 32, 32], "conv_kernel": [10, 3, 3], "conv_stride": [5, 2, 2], "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
        "num_feat_extract_layers": 3, "vocab_size": 32}  # fmt: skip
PICTURE = {"image_size": PIXELS, "patch_size": 16}

# name: (model class, configuration class, inputs, arguments of the configuration)
TEXTS: dict[str, tuple[str, str, tuple[str, ...], dict[str, Any]]] = {
    "bert": ("BertForSequenceClassification", "BertConfig", TYPES, {}),
    "roberta": ("RobertaForTokenClassification", "RobertaConfig", IDS, {}),
    "electra": ("ElectraForSequenceClassification", "ElectraConfig", TYPES, {"embedding_size": 32}),
    "distilbert": ("DistilBertForSequenceClassification", "DistilBertConfig", IDS, {"dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 128}),
    "albert": ("AlbertForSequenceClassification", "AlbertConfig", TYPES, {"embedding_size": 32}),
    "mpnet": ("MPNetForMaskedLM", "MPNetConfig", IDS, {}),
    "deberta": ("DebertaForSequenceClassification", "DebertaConfig", IDS, {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_biased_input": False, "type_vocab_size": 0}),
    "deberta_v2": ("DebertaV2ForSequenceClassification", "DebertaV2Config", IDS, {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 32, "norm_rel_ebd": "layer_norm", "share_att_key": True, "position_biased_input": False, "type_vocab_size": 0}),
    "modernbert": ("ModernBertForSequenceClassification", "ModernBertConfig", IDS, {"local_attention": 16, "global_attn_every_n_layers": 2, "initializer_cutoff_factor": 2.0}),
    "xlnet": ("XLNetForSequenceClassification", "XLNetConfig", TYPES, {"d_model": 64, "n_layer": 2, "n_head": 4, "d_inner": 128}),
    "mobilebert": ("MobileBertForSequenceClassification", "MobileBertConfig", TYPES, {"embedding_size": 32, "intra_bottleneck_size": 32, "true_hidden_size": 32}),
    "squeezebert": ("SqueezeBertForSequenceClassification", "SqueezeBertConfig", TYPES, {"embedding_size": 64}),
    "convbert": ("ConvBertForSequenceClassification", "ConvBertConfig", TYPES, {"embedding_size": 64}),
    "roformer": ("RoFormerForSequenceClassification", "RoFormerConfig", TYPES, {"embedding_size": 64}),
    "fnet": ("FNetForSequenceClassification", "FNetConfig", ("input_ids",), {}),
    "nystromformer": ("NystromformerForSequenceClassification", "NystromformerConfig", ("input_ids", "attention_mask"), {"num_landmarks": 8, "segment_means_seq_len": 24, "conv_kernel_size": 5}),
    "esm": ("EsmForMaskedLM", "EsmConfig", IDS, {"position_embedding_type": "rotary", "mask_token_id": 4}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", IDS, {"use_cache": False}),
    "gpt_neo": ("GPTNeoForCausalLM", "GPTNeoConfig", IDS, {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 8, "use_cache": False}),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", IDS, {"use_cache": False}),
    "gptj": ("GPTJForCausalLM", "GPTJConfig", IDS, {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "use_cache": False}),
    "opt": ("OPTForCausalLM", "OPTConfig", IDS, {"ffn_dim": 128, "word_embed_proj_dim": 64, "init_std": 0.125, "use_cache": False}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", IDS, GQA),
    "mistral": ("MistralForCausalLM", "MistralConfig", IDS, GQA | {"sliding_window": 8}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", IDS, GQA),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", IDS, GQA),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", IDS, GQA),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", IDS, GQA | {"sliding_window": 8}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", IDS, GQA | {"sliding_window": 8}),
    "phi": ("PhiForCausalLM", "PhiConfig", IDS, {"use_cache": False}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", IDS, {"num_key_value_heads": 2, "use_cache": False}),
    "stablelm": ("StableLmForCausalLM", "StableLmConfig", IDS, {"num_key_value_heads": 2, "use_cache": False}),
    "starcoder2": ("Starcoder2ForCausalLM", "Starcoder2Config", IDS, {"num_key_value_heads": 2, "use_cache": False}),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", IDS, {"num_key_value_heads": 2, "use_cache": False}),
    "cohere": ("CohereForCausalLM", "CohereConfig", IDS, {"num_key_value_heads": 2, "use_cache": False}),
    "bloom": ("BloomForCausalLM", "BloomConfig", IDS, {"n_layer": 2, "n_head": 4, "use_cache": False}),
    "falcon": ("FalconForCausalLM", "FalconConfig", IDS, {"alibi": False, "use_cache": False}),
    "falcon_alibi": ("FalconForCausalLM", "FalconConfig", IDS, {"alibi": True, "use_cache": False}),
    "mpt": ("MptForCausalLM", "MptConfig", IDS, {"d_model": 64, "n_layers": 2, "n_heads": 4, "expansion_ratio": 2, "max_seq_len": 128, "use_cache": False}),
    "mamba": ("MambaForCausalLM", "MambaConfig", ("input_ids",), {"state_size": 8, "use_cache": False}),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", IDS, GQA | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": ("Qwen2MoeForCausalLM", "Qwen2MoeConfig", IDS, GQA | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}),
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig", IDS, GQA | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}),
    "rwkv": ("RwkvForCausalLM", "RwkvConfig", ("input_ids",), {"use_cache": False}),
    "t5_encoder": ("T5EncoderModel", "T5Config", IDS, T5),
    "t5": ("T5ForConditionalGeneration", "T5Config", BOTH, T5),
    "bart": ("BartForConditionalGeneration", "BartConfig", BOTH, SEQ2SEQ),
    "pegasus": ("PegasusForConditionalGeneration", "PegasusConfig", BOTH, SEQ2SEQ),
    "m2m100": ("M2M100ForConditionalGeneration", "M2M100Config", BOTH, SEQ2SEQ),
}  # fmt: skip
VISION: dict[str, tuple[str, str, dict[str, Any]]] = {
    "vit": ("ViTForImageClassification", "ViTConfig", PICTURE),
    "deit": ("DeiTForImageClassification", "DeiTConfig", PICTURE),
    "beit": ("BeitForImageClassification", "BeitConfig", PICTURE | {"use_relative_position_bias": True}),
    "dinov2": ("Dinov2ForImageClassification", "Dinov2Config", PICTURE),
    "swin": ("SwinForImageClassification", "SwinConfig", {"image_size": PIXELS, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}),
    "swinv2": ("Swinv2ForImageClassification", "Swinv2Config", {"image_size": PIXELS, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}),
    "segformer": ("SegformerForSemanticSegmentation", "SegformerConfig", {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 32, 48, 64], "decoder_hidden_size": 32, "num_attention_heads": [1, 2, 2, 4]}),
    "yolos": ("YolosForObjectDetection", "YolosConfig", {"image_size": [PIXELS, PIXELS], "patch_size": 16, "num_detection_tokens": 8}),
    "convnext": ("ConvNextForImageClassification", "ConvNextConfig", {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 1, 1]}),
    "convnextv2": ("ConvNextV2ForImageClassification", "ConvNextV2Config", {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 1, 1]}),
    "mobilevit": ("MobileViTForImageClassification", "MobileViTConfig", {"image_size": PIXELS, "hidden_sizes": [32, 48, 64], "neck_hidden_sizes": [8, 16, 24, 32, 40, 48, 64]}),
    "poolformer": ("PoolFormerForImageClassification", "PoolFormerConfig", {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 1, 1]}),
    "dpt": ("DPTForDepthEstimation", "DPTConfig", PICTURE | {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [16, 32, 48, 64], "fusion_hidden_size": 32}),
    "glpn": ("GLPNForDepthEstimation", "GLPNConfig", {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 32, 48, 64], "decoder_hidden_size": 16, "num_attention_heads": [1, 2, 2, 4]}),
    "levit": ("LevitForImageClassification", "LevitConfig", {"image_size": PIXELS, "hidden_sizes": [32, 48, 64], "num_attention_heads": [2, 3, 4], "depths": [1, 1, 1], "key_dim": [16, 16, 16]}),
    "cvt": ("CvtForImageClassification", "CvtConfig", {"embed_dim": [16, 32, 64], "num_heads": [1, 2, 4], "depth": [1, 1, 2], "qkv_projection_method": ["dw_bn"] * 3}),
    "resnet_hf": ("ResNetForImageClassification", "ResNetConfig", {"embedding_size": 16, "hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 1, 1]}),
    "swin2sr": ("Swin2SRForImageSuperResolution", "Swin2SRConfig", {"image_size": PIXELS, "embed_dim": 16, "depths": [2], "num_heads": [2], "window_size": 8}),
    "pvt": ("PvtForImageClassification", "PvtConfig", {"image_size": PIXELS, "depths": [1, 1, 1, 1], "hidden_sizes": [16, 32, 48, 64], "num_attention_heads": [1, 2, 3, 4]}),
    "siglip_vision": ("SiglipVisionModel", "SiglipVisionConfig", PICTURE),
}  # fmt: skip
SOUNDS: dict[str, tuple[str, str, str, tuple[int, ...], dict[str, Any]]] = {
    "wav2vec2": ("Wav2Vec2ForCTC", "Wav2Vec2Config", "input_values", (2, 1600), WAVE),
    "wav2vec2_layer": ("Wav2Vec2ForCTC", "Wav2Vec2Config", "input_values", (2, 1600), WAVE | {"feat_extract_norm": "layer", "do_stable_layer_norm": True}),
    "hubert": ("HubertForCTC", "HubertConfig", "input_values", (2, 1600), WAVE),
    "wavlm": ("WavLMForCTC", "WavLMConfig", "input_values", (2, 1600), WAVE),
    "ast": ("ASTForAudioClassification", "ASTConfig", "input_values", (2, 64, 32), {"num_mel_bins": 32, "max_length": 64, "patch_size": 16}),
    "encodec": ("EncodecModel", "EncodecConfig", "input_values", (1, 1, 1600), {"num_filters": 4, "hidden_size": 16, "codebook_dim": 16, "codebook_size": 32, "upsampling_ratios": [4, 2]}),
    "patchtst": ("PatchTSTForPrediction", "PatchTSTConfig", "past_values", (2, 32, 3), {"num_input_channels": 3, "context_length": 32, "patch_length": 8, "patch_stride": 8, "d_model": 64, "ffn_dim": 128, "prediction_length": 8, "scaling": "std"}),
    "patchtsmixer": ("PatchTSMixerForPrediction", "PatchTSMixerConfig", "past_values", (2, 32, 3), {"num_input_channels": 3, "context_length": 32, "patch_length": 8, "patch_stride": 8, "d_model": 16, "prediction_length": 8}),
}  # fmt: skip


def made(model: str, config: str, arguments: dict[str, Any], seed: int = 0, attention: str = "eager") -> nn.Module:
    """A transformers model of small sizes."""
    transformers = importlib.import_module("transformers")
    torch.manual_seed(seed)
    kind = getattr(transformers, config)
    staged = "depths" in arguments or "depth" in arguments or "hidden_sizes" in arguments  # sizes by stage
    standard = {key: SIZES[key] for key in ("initializer_range", "num_labels")} if staged else SIZES
    settings = kind(**standard | arguments)
    build = getattr(transformers, model)
    try:
        return build._from_config(settings, attn_implementation=attention)
    except ValueError:  # a family with one implementation
        return build._from_config(settings)


def text(name: str, attention: str = "eager") -> Zoo:
    model, config, names, arguments = TEXTS[name]
    return zoo(Call(made(model, config, arguments, attention=attention), names), words(names), free(names))


def vision(name: str, attention: str = "eager") -> Zoo:
    model, config, arguments = VISION[name]
    want = 2 if name == "yolos" else 1
    return zoo(
        Call(made(model, config, arguments, attention=attention), ("pixel_values",), want),
        pictures(),
        free(("pixel_values",)),
    )


def hearing(name: str, attention: str = "eager") -> Zoo:
    model, config, field, shape, arguments = SOUNDS[name]
    return zoo(
        Call(made(model, config, arguments, attention=attention), (field,)), sound(field, shape), {field: {0: "batch"}}
    )


def whisper() -> Zoo:
    model = made(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        SEQ2SEQ | {"num_mel_bins": 16, "max_source_positions": 32, "max_target_positions": 32},
    )
    names = ("input_features", "decoder_input_ids")

    def sample(seed: int) -> dict[str, torch.Tensor]:
        return sound("input_features", (2, 16, 64))(seed) | words(("decoder_input_ids",))(seed)

    return zoo(
        Call(model, names), sample, {"input_features": {0: "batch"}, "decoder_input_ids": {0: "batch", 1: "decoder"}}
    )


def clip() -> Zoo:
    inner = {key: value for key, value in SIZES.items() if key not in ("num_labels", "initializer_range")} | {
        "initializer_range": 0.125,
        "projection_dim": 32,
    }
    model = made(
        "CLIPModel", "CLIPConfig", {"text_config": inner, "vision_config": inner | PICTURE, "projection_dim": 32}
    )
    names = ("input_ids", "pixel_values", "attention_mask")
    return zoo(Call(model, names, 4), pictures(names), free(names))


def detr() -> Zoo:
    transformers = importlib.import_module("transformers")
    backbone = transformers.ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 1, 1], out_features=["stage4"]
    )
    arguments = SEQ2SEQ | {
        "use_timm_backbone": False,
        "use_pretrained_backbone": False,
        "backbone": None,
        "backbone_config": backbone,
        "num_queries": 8,
        "num_labels": 5,
    }
    model = made("DetrForObjectDetection", "DetrConfig", arguments)
    return zoo(Call(model, ("pixel_values",), 2), pictures(), free(("pixel_values",)))


def sam() -> Zoo:
    """The mask decoder with the prompt encoder: embeddings of a picture and points in."""
    inner = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
    picture = {
        "hidden_size": 32,
        "output_channels": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 128,
        "mlp_dim": 64,
        "window_size": 4,
        "global_attn_indexes": [1],
        "num_pos_feats": 16,
    }
    prompt = {"hidden_size": 32, "image_size": 128, "image_embedding_size": 8}
    model = made(
        "SamModel",
        "SamConfig",
        {
            "vision_config": picture,
            "prompt_encoder_config": prompt,
            "mask_decoder_config": inner | {"mlp_dim": 64, "iou_head_hidden_dim": 32},
        },
    )
    names = ("image_embeddings", "input_points")

    def sample(seed: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return {
            "image_embeddings": torch.randn(1, 32, 8, 8, generator=generator),
            "input_points": 128 * torch.rand(1, 2, 1, 2, generator=generator),
        }

    return zoo(Call(model, names, 2), sample, {})
