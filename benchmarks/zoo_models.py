"""Small models of public architectures with random weights, made from their configurations: nothing is downloaded.

    from zoo_models import MODELS
    zoo = MODELS["llama"]()             # a Zoo: module, sample(seed), dynamic
    zoo.module(*zoo.sample(0).values())

Needs torch, and transformers, timm or torchvision for the entries of each. An entry builds its model only when called. Constant parameters
(scales of 1, biases of 0, layer scales of 1e-6) get noise and BatchNormalization gets statistics of its inputs, as a trained model has.
"""

# ruff: noqa: E501
from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import pathlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

VOCABULARY, TOKENS, PIXELS = 500, 24, 64


@dataclasses.dataclass(frozen=True)
class Zoo:
    """A model with what it is fed.

    Attributes:
        module: In evaluation mode, takes tensors by position, gives a tensor or a tuple.
        sample: Inputs by name, for a seed.
        dynamic: Names of free dimensions by input and axis.
    """

    module: nn.Module
    sample: Callable[[int], dict[str, torch.Tensor]]
    dynamic: dict[str, dict[int, str]]


class Call(nn.Module):
    """A transformers model called by position, with its tensors among the outputs (`want` of them) as result."""

    def __init__(self, model: nn.Module, names: tuple[str, ...], want: int = 1, **constants: Any) -> None:
        super().__init__()
        self.model, self.names, self.want, self.constants = model, names, want, constants

    def forward(self, *tensors: torch.Tensor) -> Any:
        found = self.model(**dict(zip(self.names, tensors, strict=True)), **self.constants)
        values = found.values() if hasattr(found, "values") else found if isinstance(found, (tuple, list)) else [found]
        tensors = [value for value in values if isinstance(value, torch.Tensor) and value.dtype.is_floating_point]
        return tensors[0] if self.want == 1 else tuple(tensors[: self.want])


def enliven(module: nn.Module, seed: int) -> None:
    """Noise for parameters that are constant, as in no trained model."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        if not parameter.dtype.is_floating_point or parameter.numel() < 2 or parameter.std() > 1e-5:
            continue
        noise = torch.randn(parameter.shape, generator=generator)
        level = parameter.detach().mean()
        with torch.no_grad():
            if level.abs() > 0.05:  # a scale
                parameter.mul_(1 + 0.2 * noise)
            elif level != 0 or "gamma" in name or "scale" in name:  # a layer scale, which training enlarges
                parameter.copy_(0.3 + 0.1 * noise)
            elif parameter.ndim > 1:  # a matrix that starts at zero
                parameter.copy_(noise / parameter[0].numel() ** 0.5)
            else:
                parameter.copy_(0.1 * noise)


def settle(module: nn.Module, sample: Callable[[int], dict[str, torch.Tensor]]) -> None:
    """Statistics for BatchNormalization: those of two samples, layer by layer."""
    norms = [inner for inner in module.modules() if isinstance(inner, nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.train()
        norm.momentum = 0.5
    if norms:
        with torch.no_grad():
            for seed in (100, 101, 102, 103):
                module(*sample(seed).values())
    module.eval()


def zoo(module: nn.Module, sample: Callable[[int], dict[str, torch.Tensor]], dynamic: dict[str, dict[int, str]]) -> Zoo:
    module.eval()
    enliven(module, 1)
    settle(module, sample)
    return Zoo(module.requires_grad_(True), sample, dynamic)


def without_library() -> None:
    """Operators of torchvision in Python, where its library does not load (a build for CUDA beside a PyTorch without)."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None:
        return
    with contextlib.suppress(OSError):
        torch.ops.load_library(next(pathlib.Path(spec.origin).parent.glob("_C*.so")))
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define(
        "roi_align(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, int sampling_ratio, bool aligned) -> Tensor"
    )

    importlib.import_module("torchvision.extension")._has_ops = lambda: True

    def nms(boxes: torch.Tensor, scores: torch.Tensor, threshold: float) -> torch.Tensor:
        area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
        left, kept = scores.argsort(descending=True), []
        while len(left):
            best, left = left[0], left[1:]
            kept.append(best)
            sides = torch.minimum(boxes[best, 2:], boxes[left, 2:]) - torch.maximum(boxes[best, :2], boxes[left, :2])
            shared = sides.clamp(min=0).prod(1)
            left = left[shared <= threshold * (area[best] + area[left] - shared)]
        return torch.stack(kept) if kept else left

    def roi_align(*arguments: Any) -> torch.Tensor:
        return importlib.import_module("torchvision.ops.roi_align")._roi_align(*arguments)

    library.impl("nms", nms, "CPU")
    library.impl("roi_align", roi_align, "CPU")
    _LIBRARIES.append(library)


_LIBRARIES: list[Any] = []  # an operator lives as long as its library
without_library()


# Inputs ---------------------------------------------------------------------------------------------------------------------------------


def words(names: tuple[str, ...], batch: int = 2, tokens: int = TOKENS) -> Callable[[int], dict[str, torch.Tensor]]:
    """Token ids of one padded and one full row, with mask and the other integer inputs that are named."""

    def sample(seed: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        mask = torch.ones(batch, tokens, dtype=torch.int64)
        mask[0, tokens * 2 // 3 :] = 0
        ids = torch.randint(5, VOCABULARY, (batch, tokens), generator=generator)
        made = {
            "input_ids": ids * mask + (1 - mask),
            "attention_mask": mask,
            "token_type_ids": (torch.arange(tokens) >= tokens // 2).long().expand(batch, -1).contiguous(),
            "decoder_input_ids": torch.randint(5, VOCABULARY, (batch, tokens // 2), generator=generator),
        }
        return {name: made[name] for name in names}

    return sample


def pictures(
    names: tuple[str, ...] = ("pixel_values",), batch: int = 2, size: int = PIXELS, channels: int = 3
) -> Callable[[int], dict[str, torch.Tensor]]:
    """Smooth pictures, normalized as usual; and token ids beside them where named."""

    def sample(seed: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        coarse = torch.randn(batch, channels, 8, 8, generator=generator)
        smooth = nn.functional.interpolate(coarse, (size, size), mode="bicubic", align_corners=False)
        picture = smooth + 0.1 * torch.randn(batch, channels, size, size, generator=generator)
        text = words(tuple(name for name in names if name.endswith(("_ids", "_mask"))), batch)(seed)
        return {name: text.get(name, picture) for name in names}

    return sample


def sound(name: str, shape: tuple[int, ...]) -> Callable[[int], dict[str, torch.Tensor]]:
    """Tones and noise: a wave along the last axis."""

    def sample(seed: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        time = torch.arange(shape[-1]) / shape[-1]
        pitch = 5 + 200 * torch.rand(*shape[:-1], 1, generator=generator)
        return {name: torch.sin(6.2832 * pitch * time) + 0.2 * torch.randn(shape, generator=generator)}

    return sample


def free(names: tuple[str, ...], tokens: bool = True) -> dict[str, dict[int, str]]:
    return {
        name: {0: "batch", 1: "decoder" if name.startswith("decoder") else "tokens"}
        if tokens and "_" in name and name != "pixel_values"
        else {0: "batch"}
        for name in names
    }


# transformers ---------------------------------------------------------------------------------------------------------------------------

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


# timm and torchvision -------------------------------------------------------------------------------------------------------------------

TIMM = [
    "resnet10t",
    "mobilenetv3_small_050",
    "efficientnet_b0",
    "convnext_atto",
    "regnetx_002",
    "regnety_002",
    "densenet121",
    "ghostnet_050",
    "mobileone_s0",
    "hrnet_w18_small",
    "dla34",
    "rexnet_100",
    "tinynet_e",
    "nfnet_l0",
    "repvgg_a0",
    "mixer_s32_224",
    "gmlp_ti16_224",
    "resmlp_12_224",
    "vit_tiny_patch16_224",
    "deit_tiny_patch16_224",
    "levit_128s",
    "xcit_nano_12_p16_224",
    "cait_xxs24_224",
    "pit_ti_224",
    "tnt_s_patch16_224",
    "coatnet_pico_rw_224",
    "maxvit_rmlp_pico_rw_256",
    "efficientvit_b0",
    "efficientformerv2_s0",
    "fastvit_t8",
    "edgenext_xx_small",
    "mobilevitv2_050",
    "mobilenetv4_conv_small",
    "poolformerv2_s12",
    "convmixer_768_32",
    "focalnet_tiny_srf",
    "davit_tiny",
    "sequencer2d_s",
    "hgnetv2_b0",
    "mambaout_femto",
    "starnet_s1",
    "repvit_m0_9",
    "swiftformer_xs",
    "cspdarknet53",
    "eva02_tiny_patch14_224",
    "botnet26t_256",
    "lambda_resnet26t",
    "skresnet18",
    "nf_regnet_b0",
    "swinv2_cr_tiny_224",
    "twins_svt_small",
    "visformer_tiny",
    "tiny_vit_5m_224",
]
TORCHVISION = {
    "tv_resnet18": ("resnet18", 64), "tv_mobilenet_v2": ("mobilenet_v2", 64), "tv_mobilenet_v3_small": ("mobilenet_v3_small", 64), "tv_shufflenet": ("shufflenet_v2_x0_5", 64),
    "tv_squeezenet": ("squeezenet1_1", 64), "tv_mnasnet": ("mnasnet0_5", 64), "tv_googlenet": ("googlenet", 96), "tv_regnet": ("regnet_y_400mf", 64), "tv_swin": ("swin_t", 64),
    "tv_swin_v2": ("swin_v2_t", 64), "tv_efficientnet": ("efficientnet_b0", 64), "tv_convnext": ("convnext_tiny", 64), "tv_alexnet": ("alexnet", 96),
    "tv_deeplabv3": ("deeplabv3_mobilenet_v3_large", 64), "tv_lraspp": ("lraspp_mobilenet_v3_large", 64), "tv_fcn": ("fcn_resnet50", 64),
}  # fmt: skip
DETECTORS = {"tv_fasterrcnn": "fasterrcnn_mobilenet_v3_large_320_fpn", "tv_retinanet": "retinanet_resnet50_fpn", "tv_ssdlite": "ssdlite320_mobilenet_v3_large", "tv_fcos": "fcos_resnet50_fpn", "tv_maskrcnn": "maskrcnn_resnet50_fpn"}  # fmt: skip


def timm_model(name: str) -> Zoo:
    timm = importlib.import_module("timm")
    torch.manual_seed(0)
    size = PIXELS
    try:
        model = timm.create_model(name, pretrained=False, num_classes=10, exportable=True, img_size=size)
    except TypeError:
        model = timm.create_model(name, pretrained=False, num_classes=10, exportable=True)
    except (AssertionError, RuntimeError, ValueError):
        model = timm.create_model(name, pretrained=False, num_classes=10, exportable=True)
        size = model.default_cfg["input_size"][-1]
    return zoo(model, pictures(("image",), size=size), {"image": {0: "batch"}})


def torchvision_model(name: str) -> Zoo:
    torchvision = importlib.import_module("torchvision")
    torch.manual_seed(0)
    builder, size = TORCHVISION[name]
    segments = builder in ("deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large", "fcn_resnet50")
    options: dict[str, Any] = {"weights_backbone": None} if segments else {}
    if builder == "googlenet":
        options = {"aux_logits": False, "init_weights": True}
    model = torchvision.models.get_model(builder, weights=None, num_classes=10, **options)
    return zoo(Named(model) if segments else model, pictures(("image",), size=size), {"image": {0: "batch"}})


class Named(nn.Module):
    """The entry ``out`` of a model of torchvision that gives a dictionary."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.model(image)["out"]


class Detector(nn.Module):
    """A detector of torchvision: one picture in, boxes, scores and labels out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = self.model([image])[0]
        return tuple(found[key] for key in ("boxes", "scores", "labels"))


def detector(name: str) -> Zoo:
    torchvision = importlib.import_module("torchvision")
    torch.manual_seed(0)
    kind = DETECTORS[name]
    options: dict[str, Any] = {} if "ssdlite" in kind else {"min_size": 96, "max_size": 128}
    if "rcnn" in kind:
        options |= {"rpn_pre_nms_top_n_test": 100, "rpn_post_nms_top_n_test": 20}
    else:
        options |= {"topk_candidates": 50}
    model = torchvision.models.get_model(kind, weights=None, weights_backbone=None, num_classes=5, **options)
    single = pictures(("image",), batch=1, size=96)
    return zoo(
        Detector(model),
        lambda seed: {"image": single(seed)["image"][0].sigmoid()},
        {"image": {1: "height", 2: "width"}},
    )


def raft() -> Zoo:
    torchvision = importlib.import_module("torchvision")
    torch.manual_seed(0)

    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = torchvision.models.optical_flow.raft_small(weights=None)

        def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
            return self.model(first, second, num_flow_updates=2)[-1]

    single = pictures(("image",), batch=1, size=128)
    return zoo(
        Flow(), lambda seed: {"first": single(seed)["image"].tanh(), "second": single(seed + 50)["image"].tanh()}, {}
    )


MODELS: dict[str, Callable[..., Zoo]] = {
    **{name: lambda name=name, **options: text(name, **options) for name in TEXTS},
    **{name: lambda name=name, **options: vision(name, **options) for name in VISION},
    **{name: lambda name=name, **options: hearing(name, **options) for name in SOUNDS},
    "whisper": whisper, "clip": clip, "detr": detr, "sam": sam, "tv_raft": raft,
    **{f"timm_{name}": lambda name=name: timm_model(name) for name in TIMM},
    **{name: lambda name=name: torchvision_model(name) for name in TORCHVISION},
    **{name: lambda name=name: detector(name) for name in DETECTORS},
}  # fmt: skip


def export(model: Zoo, path: str, *, dynamo: bool, opset: int, free: bool) -> None:
    """Write a model as ONNX by PyTorch's exporter, the new or the old one, with free or fixed sizes."""
    inputs = model.sample(0)
    arguments: dict[str, Any] = {"input_names": list(inputs), "opset_version": opset, "dynamo": dynamo}
    if free and dynamo:
        arguments["dynamic_shapes"] = (
            (tuple(dict.fromkeys(model.dynamic.get(name, {}), torch.export.Dim.AUTO) for name in inputs),)
            if isinstance(model.module, Call)
            else tuple(dict.fromkeys(model.dynamic.get(name, {}), torch.export.Dim.AUTO) for name in inputs)
        )
    elif free:
        arguments["dynamic_axes"] = model.dynamic
    if dynamo:
        arguments |= {"external_data": False, "verbose": False}
    torch.onnx.export(model.module, tuple(inputs.values()), path, **arguments)
