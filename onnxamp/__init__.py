"""Mixed precision and training for ONNX models, on the runtime you already ship.

The public names are loaded on first use, so that `import onnxamp` stays cheap. No module here is called like a public
function: importing such a submodule would put the module in the function's place (so `conversion.py` has `convert`, and
`comparison/` has `diff`).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from onnxamp.comparison import GraphDiff, diff
    from onnxamp.conversion import ConvertResult, convert, widen
    from onnxamp.errors import AmpError
    from onnxamp.evidence import verify
    from onnxamp.passes.emulate import emulate
    from onnxamp.trainer.trainer import Trainer
    from onnxamp.training.head import replace_head

__all__ = [
    "AmpError",
    "ConvertResult",
    "GraphDiff",
    "Trainer",
    "__version__",
    "convert",
    "diff",
    "emulate",
    "replace_head",
    "verify",
    "widen",
]

_HOME = {
    "AmpError": "onnxamp.errors",
    "ConvertResult": "onnxamp.conversion",
    "GraphDiff": "onnxamp.comparison",
    "Trainer": "onnxamp.trainer.trainer",
    "convert": "onnxamp.conversion",
    "diff": "onnxamp.comparison",
    "emulate": "onnxamp.passes.emulate",
    "replace_head": "onnxamp.training.head",
    "verify": "onnxamp.evidence",
    "widen": "onnxamp.conversion",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'onnxamp' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
