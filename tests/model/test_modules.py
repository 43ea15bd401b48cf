"""Which modules nodes come from, and which of them have parameters of their own."""

import onnx_ir as ir
import pytest

from onnxamp.model.modules import are_apart, are_siblings, around, module_of_node, owners


@pytest.mark.parametrize(
    ("name", "metadata", "module"),
    [
        ("/enc/layers.0/MatMul", {}, "enc.layers.0"),
        ("/enc/down/down.1/down.1.0/Relu", {}, "enc.down.1.0"),
        ("/down_1/down.1_1/Relu", {}, "down.1_1"),
        ("/MatMul", {}, ""),
        ("node_MatMul_3", {}, ""),
        ("", {}, ""),
        ("node_linear", {"pkg.torch.onnx.name_scopes": "['', 'enc', 'enc.layers.0', 'linear']"}, "enc.layers.0"),
        ("/other/MatMul", {"pkg.torch.onnx.name_scopes": "['', 'enc', 'linear']"}, "enc"),
        ("node_linear", {"pkg.torch.onnx.name_scopes": "no list"}, ""),
    ],
)
def test_modules_of_nodes(name, metadata, module):
    assert module_of_node(ir.Node("", "MatMul", [], name=name, metadata_props=metadata)) == module


def test_modules_around():
    assert list(around("a.0.b")) == ["a.0.b", "a.0", "a"]
    assert list(around("")) == []
    assert owners(["a.0.weight", "bias"]) == {"a.0", "a"}


@pytest.mark.parametrize(
    ("paths", "siblings"),
    [
        (("a.0.b", "a.1.b"), True),
        (("a.0.0.b", "a.1.3.b", "a.2.0.b"), True),
        (("a.0.b", "a.0.b"), False),
        (("a.0.b", "a.1.c"), False),
        (("a.0", "a.0.b"), False),
        (("q", "k"), False),
    ],
)
def test_siblings(paths, siblings):
    assert are_siblings(paths) == siblings


@pytest.mark.parametrize(
    ("paths", "tensors", "apart"),
    [
        (("a.0", "a.1"), ("a.0.bias", "a.1.bias"), True),
        (("a.0", "a.1"), ("a.0.bias",), False),  # the second one's bias is tied, too
        (("a.0", "a.0_1"), ("a.0.bias",), False),  # called twice
        (("a", "a_1"), ("a.bias", "a_1.bias"), True),
        (("q", "k"), ("q.bias", "k.bias"), True),
        (("q", "k"), (), False),
        (("a.0.q", "a.1.q"), ("a.0.norm.weight", "a.1.norm.weight"), True),
        (("a.0.q", "a.0.k"), ("a.0.norm.weight",), False),
        (("a.0.q", "a.1.q", ""), ("a.0.norm.weight", "a.1.norm.weight"), False),
        (("a.0.q", "b.0.q"), ("a.0.norm.weight", "b.0.norm.weight"), False),
        (("a.0.1", "a.1.1"), ("a.0.0.weight", "a.1.0.weight"), True),
        (("a.0",), ("a.0.bias",), False),
    ],
)
def test_what_has_parameters_of_its_own(paths, tensors, apart):
    assert are_apart(paths, owners(tensors)) == apart
