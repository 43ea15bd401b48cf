"""Keep ONNX Runtime from making one node of mixed types out of a layer normalization that is written out."""

from __future__ import annotations

import onnx_ir as ir

from onnxamp.errors import UnsupportedError
from onnxamp.model.constants import constant_tensor
from onnxamp.model.naming import Names
from onnxamp.model.units import Read
from onnxamp.passes.constants import add_copy
from onnxamp.policy.plan import Plan


class UnfusePass(ir.passes.InPlacePass):
    """Give the bias behind a normalization a leading dimension, where its fusion would not load.

    1. The plan names the biases (`policy.affine`): x has one precision, scale and bias the other, and neither may change.
    2. Such a bias b of shape [n] becomes ``b__row`` of shape [1, n], a constant of its own that only this Add reads. ONNX Runtime
       fuses vectors only; the sum is the same, as the normalized value has two dimensions or more.
    3. Below IR 4 the copy is listed as an input, like every initializer.
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        if not self.plan.apart:
            return ir.passes.PassResult(model, modified=False)
        names = Names(model)
        modified = False
        for read in self.plan.apart:
            assert isinstance(read.site, ir.Node)
            bias = read.site.inputs[read.index]
            assert bias is not None
            tensor = constant_tensor(bias)
            assert tensor is not None
            if len(tensor.shape) == 1:
                self._refuse_vectors(read)
                assert bias.name is not None
                content = ir.Tensor(tensor.numpy().reshape(1, -1), dtype=tensor.dtype)
                row = add_copy(bias, content, names.copy(bias.name, "row"), names)
                if model.ir_version < 4 and row.is_initializer():
                    model.graph.inputs.append(row)
                read.redirect(row)
                modified = True
        return ir.passes.PassResult(model, modified)

    def _refuse_vectors(self, read: Read) -> None:
        """Raises UnsupportedError where a leading dimension could show in the result."""
        assert isinstance(read.site, ir.Node)
        shape = read.site.outputs[0].shape
        if shape is None or len(shape) < 2:
            rank = "of unknown rank" if shape is None else "a vector"
            raise UnsupportedError(
                f"Add node {read.site.name or read.site.outputs[0].name!r} belongs to a layer normalization in two precisions, which ONNX "
                f"Runtime would fuse into a node that does not load, and its result is {rank}: keep or lower the whole normalization "
                "together with the node in front of it."
            )
