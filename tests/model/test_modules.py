"""Which modules nodes come from, and which of them have parameters of their own."""

import onnx_ir as ir
import pytest

from onnxamp.model.modules import apart_from, are_siblings, around, is_second_call, module_of_node, numbers


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
    ("path", "other", "outer"),
    [
        ("a.0.b", "a.1.b", "a.0"),
        ("a.0.b.c", "a.1", "a.0"),
        ("q", "k", "q"),
        ("a.norm", "a", "a.norm"),
        ("norm", "a.0", "norm"),
    ],
)
def test_the_part_of_a_path_that_is_not_around_another(path, other, outer):
    assert apart_from(path, other) == outer


def test_calls_and_numbers():
    assert is_second_call("a.0_1.q", "a.0.q")
    assert not is_second_call("a.1.q", "a.0.q")
    assert not is_second_call("a", "a")
    assert numbers("layers.0.blocks.13.norm1") == (0, 13)
