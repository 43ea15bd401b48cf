"""Models written as text, with weights."""

from __future__ import annotations

import numpy as np
import onnx


def parse(text, opset=18):
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : {opset}, "test" : 1]> {text}')


def with_weights(proto, **tensors):
    rng = np.random.default_rng(0)
    for name, value in tensors.items():
        array = rng.standard_normal(value).astype(np.float32) if isinstance(value, tuple) else value
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(array), name))
    return proto
