"""Whether ONNX Runtime opens a 16-bit file on the CPU as a program does that sets nothing.

At its default optimization level it ends the process on some valid models (its issue 28392, on processors with AVX). Where a
Transpose reaches a MatMul through a Cast, which may be one of its own, MatmulTransposeFusion exchanges the two. If it then cannot merge
them, because the operands have unequal ranks, nodes without a schema are left, and NchwcTransformer reads them. What the
transformations before and between do to the graph decides whether it comes to that, so no look at the file tells: it is opened, in a
process of its own. Files without a Transpose of an activation and a MatMul are not, nor those whose weights would take memory and time.
"""

from __future__ import annotations

import os

import onnx_ir as ir

from onnxamp.dtypes import LOW
from onnxamp.errors import InternalError
from onnxamp.model.constants import constant_bytes
from onnxamp.model.units import all_nodes
from onnxamp.ort import worker
from onnxamp.ort.session import SessionConfig
from onnxamp.passes.constants import float_constants

# The runtime holds 16-bit weights once more in FP32: 768 MiB at most.
_MOST_BYTES = 256 << 20


def crash_on_cpu(model: ir.Model, path: str | os.PathLike[str]) -> str:
    """What to tell the user of a file on which the runtime ends its process.

    Empty if it does not, if there is no runtime here, or if the file is large (`verify` opens those too).

    Args:
        model: What the file holds.
        path: The file.
    """
    if not _may_crash(model):
        return ""
    try:
        answer = worker.shared().run(path, config=SessionConfig(provider="cpu", optimization="all"))
    except (MemoryError, InternalError):  # the file is written; what cannot be looked at is not its fault
        return ""
    return f"On the CPU {answer.note or answer.error}" if answer.crashed else ""


def _may_crash(model: ir.Model) -> bool:
    """Whether there are 16-bit values, a Transpose of something else than a constant, a MatMul, and not too many weights."""
    if sum(map(constant_bytes, float_constants(model.graph))) > _MOST_BYTES:
        return False
    moved = multiplied = low = False
    for node in all_nodes(model.graph):
        low = low or any(value.dtype in LOW for value in node.outputs)
        multiplied = multiplied or node.op_type in ("MatMul", "FusedMatMul")
        if node.op_type == "Transpose" and node.inputs[0] is not None:
            moved = moved or node.inputs[0].const_value is None
    return moved and multiplied and low
