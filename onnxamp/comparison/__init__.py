"""`diff`: what changed between two ONNX models, where and why."""

from onnxamp.comparison.compare import diff
from onnxamp.comparison.records import (
    CastChange,
    ConstantChange,
    Decision,
    Edited,
    GraphDiff,
    Island,
    ModelChange,
    ModelInfo,
    Moved,
    NodeChange,
    NodeRef,
    Renamed,
    Retyped,
)
from onnxamp.comparison.view import conversion_page, diff_page

__all__ = [
    "CastChange",
    "ConstantChange",
    "Decision",
    "Edited",
    "GraphDiff",
    "Island",
    "ModelChange",
    "ModelInfo",
    "Moved",
    "NodeChange",
    "NodeRef",
    "Renamed",
    "Retyped",
    "conversion_page",
    "diff",
    "diff_page",
]
