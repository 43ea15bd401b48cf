"""Loading gives a private copy of all that a file holds; saving gives it back, whole or not at all."""

import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxamp.dtypes import BF16, FP16
from onnxamp.errors import ModelError, RuntimeMissingError, UsageError
from onnxamp.model import io, tensors
from onnxamp.model.half import to_half


def full_model() -> onnx.ModelProto:
    """A model with every field set that a file may carry, in the order in which onnx-ir writes lists."""
    floats = TensorProto.FLOAT
    weight = numpy_helper.from_array(np.arange(6, dtype=np.float32).reshape(2, 3), "w")
    weight.doc_string = "weights"
    weight.metadata_props.add(key="origin", value="training")
    body = helper.make_graph(
        [helper.make_node("Add", ["x", "b"], ["t"], name="inner")],
        "then",
        [],
        [helper.make_tensor_value_info("t", floats, None)],
        [numpy_helper.from_array(np.float32(1).reshape(()), "b")],
    )
    other = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["e"])], "else", [], [helper.make_tensor_value_info("e", floats, None)]
    )
    nodes = [
        helper.make_node("If", ["c"], ["chosen"], name="branch", then_branch=body, else_branch=other),
        helper.make_node("Call", ["chosen", ""], ["called"], name="call", domain="local", overload="v2", alpha=2.0),
        helper.make_node("MatMul", ["called", "w"], ["y"], name="mm", doc_string="a node"),
        helper.make_node("SequenceConstruct", ["y"], ["s"], name="seq"),
    ]
    nodes[2].metadata_props.add(key="namespace", value="/block")
    graph = helper.make_graph(
        nodes,
        "main",
        [
            helper.make_tensor_value_info("x", floats, ["n", 2]),
            helper.make_tensor_value_info("c", TensorProto.BOOL, []),
        ],
        [
            helper.make_tensor_value_info("y", floats, ["n", 3]),
            helper.make_tensor_sequence_value_info("s", floats, None),
        ],
        [weight],
        doc_string="a graph",
        value_info=[helper.make_tensor_value_info("called", floats, ["n", None], doc_string="a value")],
    )
    graph.input[0].type.tensor_type.shape.dim[0].denotation = "DATA_BATCH"
    graph.input[0].type.denotation = "TENSOR"
    graph.metadata_props.add(key="g", value="1")
    annotation = graph.quantization_annotation.add(tensor_name="x")
    annotation.quant_parameter_tensor_names.add(key="SCALE_TENSOR", value="w")
    function = helper.make_function(
        "local",
        "Call",
        ["a", "unused"],
        ["r"],
        [helper.make_node("LeakyRelu", ["a"], ["r"])],
        [helper.make_opsetid("", 21)],
        attributes=["beta"],
        attribute_protos=[helper.make_attribute("alpha", 0.5)],
        overload="v2",
        doc_string="a function",
    )
    function.metadata_props.add(key="f", value="1")
    model = helper.make_model(
        graph,
        functions=[function],
        ir_version=11,
        opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("local", 1)],
        producer_name="p",
        producer_version="v",
        domain="d",
        model_version=3,
        doc_string="a model",
    )
    model.metadata_props.add(key="k", value="v")
    configuration = model.configuration.add(name="two", num_devices=2)
    configuration.device.extend(["0", "1"])
    return model


def test_every_field_survives(tmp_path: pathlib.Path) -> None:
    source = full_model()
    path = tmp_path / "m.onnx"
    io.save(io.load(source), path)
    assert onnx.load(path) == source
    io.save(io.load(path), tmp_path / "again.onnx")
    assert (tmp_path / "again.onnx").read_bytes() == path.read_bytes()


def test_loading_never_touches_the_source() -> None:
    source = full_model()
    before = source.SerializeToString(deterministic=True)
    model = io.load(source)
    copy = io.load(model)
    copy.graph.inputs[0].name = "renamed"
    copy.graph.inputs[0].type = ir.TensorType(ir.DataType.FLOAT16)
    copy.graph.remove(copy.graph[-1], safe=False)
    assert model.graph.inputs[0].name == "x"
    assert len(model.graph) == 4
    assert source.SerializeToString(deterministic=True) == before
    assert copy.graph.initializers["w"].const_value is model.graph.initializers["w"].const_value  # shared, not copied


def test_sparse_tensors_become_dense() -> None:
    values = numpy_helper.from_array(np.array([3.0, -1.0], np.float32), "sp")
    flat = helper.make_sparse_tensor(values, numpy_helper.from_array(np.array([1, 5]), "i"), [2, 3])
    pairs = helper.make_sparse_tensor(values, numpy_helper.from_array(np.array([[0, 1], [1, 2]]), "i"), [2, 3])
    graph = helper.make_graph(
        [helper.make_node("Constant", [], ["k"], sparse_value=pairs), helper.make_node("Add", ["k", "sp"], ["y"])],
        "g",
        [],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 3])],
        sparse_initializer=[flat],
    )
    source = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)])
    before = source.SerializeToString()
    model = io.load(source)
    assert source.SerializeToString() == before
    dense = np.array([[0, 3, 0], [0, 0, -1]], np.float32)
    np.testing.assert_array_equal(model.graph.initializers["sp"].const_value.numpy(), dense)
    np.testing.assert_array_equal(model.graph[0].attributes["value"].as_tensor().numpy(), dense)
    onnx.checker.check_model(io.to_proto(model), full_check=True)


def test_map_types_are_carried() -> None:
    maps = onnx.TypeProto()
    maps.sequence_type.elem_type.map_type.key_type = TensorProto.INT64
    maps.sequence_type.elem_type.map_type.value_type.tensor_type.elem_type = TensorProto.FLOAT
    graph = helper.make_graph(
        [helper.make_node("ZipMap", ["x"], ["z"], domain="ai.onnx.ml", classlabels_int64s=[1, 2])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, 2])],
        [onnx.ValueInfoProto(name="z", type=maps)],
    )
    source = helper.make_model(graph, opset_imports=[helper.make_opsetid("ai.onnx.ml", 3)])
    assert io.to_proto(io.load(io.load(source))) == source


def test_unsorted_nodes_are_sorted() -> None:
    graph = onnx.parser.parse_graph("g (float[2] x) => (float[2] y) { y = Relu(h)  h = Neg(x) }")
    model = io.load(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]))
    assert [node.op_type for node in model.graph] == ["Neg", "Relu"]


def weights(path: pathlib.Path, **external: object) -> onnx.ModelProto:
    """A model with two weights, saved with external data."""
    graph = onnx.parser.parse_graph("g (float[2,1024] x) => (float[2,8] y) { h = MatMul(x, w)  y = Add(h, b) }")
    rng = np.random.default_rng(0)
    graph.initializer.append(numpy_helper.from_array(rng.standard_normal((1024, 8), np.float32), "w"))
    graph.initializer.append(numpy_helper.from_array(rng.standard_normal((2, 8), np.float32), "b"))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    onnx.save(model, path, save_as_external_data=True, location="w.bin", size_threshold=0)
    return onnx.load(path)


def test_external_data_stay_external(tmp_path: pathlib.Path) -> None:
    source = weights(tmp_path / "a.onnx")
    (tmp_path / "out").mkdir()
    for name in ("b.onnx", "c.onnx"):
        model = io.load(tmp_path / "a.onnx")
        value = model.graph.initializers["w"]
        value.const_value = tensors.ConvertedTensor(value.const_value, FP16)
        value.type = ir.TensorType(ir.DataType.FLOAT16)
        io.save(model, tmp_path / "out" / name)
        assert tensors.is_external(value.const_value)  # saving puts the tensors back
    read = onnx.load(tmp_path / "out" / "b.onnx")
    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in read.graph.initializer}
    np.testing.assert_array_equal(arrays["w"], numpy_helper.to_array(source.graph.initializer[0]).astype(np.float16))
    np.testing.assert_array_equal(arrays["b"], numpy_helper.to_array(source.graph.initializer[1]))
    data = sorted(path.name for path in (tmp_path / "out").glob("*.data"))
    assert [name.partition("-")[0] for name in data] == ["b", "c"]
    assert data[0].partition("-")[2] == data[1].partition("-")[2]  # called after the content
    assert not list((tmp_path / "out").glob("*.tmp"))


def test_too_many_inline_bytes_move_out(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = weights(tmp_path / "a.onnx")
    monkeypatch.setattr(io, "INLINE_BYTES", 10_000)
    io.save(io.load(source), tmp_path / "b.onnx")
    raw = onnx.load(tmp_path / "b.onnx", load_external_data=False)
    assert [tensor.data_location for tensor in raw.graph.initializer] == [TensorProto.EXTERNAL, TensorProto.DEFAULT]
    loaded = onnx.load(tmp_path / "b.onnx")
    for a, b in zip(loaded.graph.initializer, source.graph.initializer, strict=True):
        np.testing.assert_array_equal(numpy_helper.to_array(a), numpy_helper.to_array(b))


def test_nothing_is_overwritten_unasked(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(b"mine")
    model = io.load(full_model())
    with pytest.raises(UsageError, match="exists already"):
        io.save(model, path)
    assert path.read_bytes() == b"mine"
    io.save(model, path, overwrite=True)
    assert onnx.load(path) == full_model()
    with pytest.raises(UsageError, match="no folder"):
        io.save(model, tmp_path / "nowhere" / "m.onnx")


def test_a_failed_write_leaves_nothing(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RuntimeMissingError, match="No space left"):
        io.save(io.load(full_model()), tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", [FP16, BF16], ids=lambda kind: kind.name)
def test_conversion_in_blocks_equals_the_whole(
    kind: object, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensors, "BLOCK_BYTES", 1000)
    source = weights(tmp_path / "a.onnx")
    array = numpy_helper.to_array(source.graph.initializer[0])
    external = io.load(tmp_path / "a.onnx").graph.initializers["w"].const_value
    assert isinstance(external, ir.ExternalTensor)
    for tensor in (external, ir.Tensor(array)):
        converted = tensors.ConvertedTensor(tensor, kind, limit=1.5)  # type: ignore[arg-type]
        pieces = list(tensors.byte_blocks(converted))
        assert len(pieces) > 10
        assert max(map(len, pieces)) <= 1000
        want = np.clip(array, -1.5, 1.5).astype(kind.numpy)  # type: ignore[attr-defined]
        assert b"".join(pieces) == want.tobytes() == converted.tobytes() == converted.numpy().tobytes()


def test_half_is_numpys_bit_for_bit() -> None:
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32).view(np.uint32).astype(np.int64)
    ties = np.add.outer([-4097, -4096, -4095, -1, 0, 1, 4095, 4096, 4097], halves).reshape(-1) % (1 << 32)
    numbers = np.concatenate([ties, np.arange(0, 1 << 32, 4099)]).astype(np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        want = numbers.astype(np.float16)
    np.testing.assert_array_equal(to_half(numbers).view(np.uint16), want.view(np.uint16))
    np.testing.assert_array_equal(to_half(numbers[:24].reshape(2, 3, 4).T), want[:24].reshape(2, 3, 4).T)
    assert to_half(np.float32(1.5) * np.ones((), np.float32)).shape == ()


def test_blocks_of_a_large_tensor_come_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "BLOCK_BYTES", 1000)
    array = np.arange(12345, dtype=np.float32)
    slow = {0.0: 0.02, 250.0: 0.01}
    assert (
        sum(tensors.mapped(ir.Tensor(array), lambda block: time.sleep(slow.get(float(block[0]), 0)) or block.size))
        == 12345
    )
    np.testing.assert_array_equal(np.concatenate(list(tensors.blocks(ir.Tensor(array)))), array)
    with pytest.raises(ZeroDivisionError):
        list(tensors.mapped(ir.Tensor(array), lambda block: 1 // int(block[0] < 5000)))
    first = tensors.blocks(ir.Tensor(array))
    assert next(first)[0] == 0
    first.close()  # type: ignore[attr-defined]  # who stops early leaves no thread behind
    assert threading.active_count() == 1


def test_a_kill_leaves_nothing_under_the_final_names(tmp_path: pathlib.Path) -> None:
    weights(tmp_path / "a.onnx")
    code = """
import os, signal, sys
from onnxamp import files
from onnxamp.model import io, tensors
tensors.BLOCK_BYTES = 1000
whole = files.Unfinished.write
def write(self, data):
    if self.file.tell() > 5000:
        self.file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    whole(self, data)
files.Unfinished.write = write
io.save(io.load(sys.argv[1]), sys.argv[2])
"""
    (tmp_path / "out").mkdir()
    command = [sys.executable, "-c", code, os.fspath(tmp_path / "a.onnx"), os.fspath(tmp_path / "out" / "b.onnx")]
    assert subprocess.run(command, capture_output=True, check=False).returncode == -signal.SIGKILL
    (left,) = (tmp_path / "out").iterdir()
    assert left.name.startswith(".b-")
    assert left.stat().st_size > 5000


def test_clamping_spares_infinities() -> None:
    array = np.array([-np.inf, np.inf, np.nan, -1e9, 70000.0, -2.0, -0.0], np.float32)
    got = tensors.ConvertedTensor(ir.Tensor(array), FP16, limit=32752.0).numpy()
    np.testing.assert_array_equal(got, np.array([-np.inf, np.inf, np.nan, -32752, 32752, -2, -0.0], np.float16))
    assert np.signbit(got[-1])


def test_data_that_shrink_after_loading_are_an_error(tmp_path: pathlib.Path) -> None:
    weights(tmp_path / "a.onnx")
    model = io.load(tmp_path / "a.onnx")
    (tmp_path / "w.bin").write_bytes(b"short")
    with pytest.raises(ModelError, match="ended before"):
        io.save(model, tmp_path / "b.onnx")
    assert not (tmp_path / "b.onnx").exists()
    (tmp_path / "w.bin").unlink()
    with pytest.raises(ModelError, match="cannot be read"):
        io.save(model, tmp_path / "b.onnx")
