"""The memory layouts that the runtime's CPU kernels prefer on this machine."""

from __future__ import annotations

import functools

import numpy as np
import onnx

from onnxamp.errors import AmpError
from onnxamp.ort.session import SessionConfig, open_session, run

_PROBE = """<ir_version: 8, opset_import: ["" : 17, "com.microsoft.nchwc" : 1]>
probe (float[1, 64, 1, 2] x) => (float[1, 64, 1, 2] y) { y = com.microsoft.nchwc.ReorderInput(x) }"""


@functools.cache
def channel_block() -> int:
    """B of the blocked layout [N, C/B, H, W, B] of ONNX Runtime's convolutions: 8 or 16 by the processor, 0 if it has none.

    No call tells it, so a tensor is reordered: its second position comes after the first B channels.
    """
    x = np.arange(128, dtype=np.float32).reshape(1, 64, 1, 2)
    try:
        session = open_session(onnx.parser.parse_model(_PROBE), SessionConfig("cpu", threads=1))
        order = run(session, {"x": x})["y"].ravel().tolist()
    except AmpError:
        return 0
    block = order.index(1.0)
    return block if block > 1 and order[:block] == list(range(0, 2 * block, 2)) else 0
