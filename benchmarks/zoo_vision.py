"""Small models of timm and torchvision with random weights."""

# ruff: noqa: E501
from __future__ import annotations

import contextlib
import importlib
import importlib.util
import pathlib
from typing import Any

import torch
from torch import nn
from zoo_base import PIXELS, Zoo, pictures, zoo

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
