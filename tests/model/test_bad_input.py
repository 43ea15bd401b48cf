"""Every kind of broken file ends in one sentence of the right class that names the place."""

import os
import pathlib
from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxamp.errors import AmpError, ModelError, UnsupportedError, UsageError
from onnxamp.model import io


def parsed(text: str, opsets: tuple[tuple[str, int], ...] = (("", 17),)) -> onnx.ModelProto:
    graph = onnx.parser.parse_graph(text)
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid(*opset) for opset in opsets])


def plain() -> onnx.ModelProto:
    model = parsed("g (float[2,3] x) => (float[2,3] y) { y = Mul(x, w) }")
    model.graph.initializer.append(numpy_helper.from_array(np.ones(3, np.float32), "w"))
    return model


def changed(change: Callable[[onnx.ModelProto], object]) -> onnx.ModelProto:
    model = plain()
    change(model)
    return model


def dims(*sizes: int) -> Callable[[onnx.ModelProto], None]:
    def change(model: onnx.ModelProto) -> None:
        model.graph.initializer[0].dims[:] = sizes

    return change


def body_reads_nothing() -> onnx.ModelProto:
    return parsed(
        "g (bool c) => (float y) { y = If (c) <then_branch = t () => (float a) { a = Relu(lost) }, else_branch = e () => (float b) { b = Constant <value_float = 1.0> () }> }"
    )


def branch_hands_out_an_outer_value() -> onnx.ModelProto:
    return parsed(
        "g (bool c, float x) => (float y) { h = Neg(x) y = If (c) <then_branch = t () => (float h) { }, else_branch = e () => (float b) { b = Relu(h) }> }"
    )


def sparse_outside() -> onnx.ModelProto:
    model = plain()
    values = numpy_helper.from_array(np.ones(1, np.float32), "s")
    model.graph.sparse_initializer.append(
        helper.make_sparse_tensor(values, numpy_helper.from_array(np.array([7]), "i"), [2, 3])
    )
    return model


def sparse_huge() -> onnx.ModelProto:
    model = sparse_outside()
    model.graph.sparse_initializer[0].dims[:] = [1 << 40, 1 << 40]
    return model


# fmt: off
# ruff: noqa: E501
BROKEN = {
    "outer value as output of a branch": (branch_hands_out_an_outer_value, ModelError, "'h' of graph 't'.*Identity"),
    "cycle": (
        lambda: parsed("g (float x) => (float y) { a = Add(x, b)  b = Relu(a)  y = Neg(b) }"),
        ModelError,
        "cycle",
    ),
    "defined twice": (
        lambda: parsed("g (float x) => (float y) { y = Neg(x)  y = Relu(x) }"),
        ModelError,
        "defines 'y' twice.*Relu",
    ),
    "input twice": (
        lambda: parsed("g (float x, float x) => (float y) { y = Neg(x) }"),
        ModelError,
        "two inputs called 'x'",
    ),
    "initializer twice": (
        lambda: changed(lambda m: m.graph.initializer.append(m.graph.initializer[0])),
        ModelError,
        "called 'w'",
    ),
    "nameless initializer": (
        lambda: changed(lambda m: m.graph.initializer[0].ClearField("name")),
        ModelError,
        "without a name",
    ),
    "unknown name": (
        lambda: parsed("g (float x) => (float y) { y = Add(x, lost) }"),
        ModelError,
        "Add node 'y' reads 'lost'",
    ),
    "unknown name in a body": (body_reads_nothing, ModelError, "Relu node 'a' reads 'lost'"),
    "output without node": (lambda: parsed("g (float x) => (float z) { y = Neg(x) }"), ModelError, "Output 'z'"),
    "domain not imported": (
        lambda: parsed("g (float x) => (float y) { y = my.Op(x) }"),
        ModelError,
        "'my', which the model does not import",
    ),
    "ai.onnx not imported": (lambda: parsed("g (float x) => (float y) { y = Neg(x) }", ()), ModelError, "'ai.onnx'"),
    "domain imported twice": (
        lambda: parsed("g (float x) => (float y) { y = Neg(x) }", (("", 17), ("ai.onnx", 18))),
        ModelError,
        "two versions",
    ),
    "no operator": (lambda: changed(lambda m: m.graph.node[0].ClearField("op_type")), ModelError, "has no operator"),
    "no graph": (lambda: changed(lambda m: m.ClearField("graph")), ModelError, "no graph"),
    "empty graph": (lambda: changed(lambda m: m.graph.Clear()), ModelError, "empty"),
    "no IR version": (lambda: changed(lambda m: m.ClearField("ir_version")), ModelError, "no IR version"),
    "future IR": (lambda: changed(lambda m: setattr(m, "ir_version", 1000)), UnsupportedError, "IR version 1000"),
    "future opset": (
        lambda: changed(lambda m: setattr(m.opset_import[0], "version", 1000)),
        UnsupportedError,
        "opset 1000",
    ),
    "training graph": (lambda: changed(lambda m: m.training_info.add()), UnsupportedError, "training_info"),
    "huge dimensions": (lambda: changed(dims(1 << 62, 1 << 62)), ModelError, "Tensor 'w'.*needs .* bytes and has 12"),
    "too many elements": (lambda: changed(dims(2, 3)), ModelError, "needs 24 bytes and has 12"),
    "negative dimension": (lambda: changed(dims(-3)), ModelError, "negative dimension"),
    "unknown element type": (
        lambda: changed(lambda m: setattr(m.graph.initializer[0], "data_type", 99)),
        ModelError,
        "type 99",
    ),
    "no element type": (
        lambda: changed(lambda m: setattr(m.graph.initializer[0], "data_type", 0)),
        ModelError,
        "type 0",
    ),
    "typed data missing": (
        lambda: changed(lambda m: m.graph.initializer[0].ClearField("raw_data")),
        ModelError,
        "needs 3 elements and has 0",
    ),
    "external data of a proto": (
        lambda: changed(lambda m: setattr(m.graph.initializer[0], "data_location", TensorProto.EXTERNAL)),
        ModelError,
        "pass the path",
    ),
    "sparse index outside": (sparse_outside, ModelError, "'s' has an index outside"),
    "sparse too large": (sparse_huge, ModelError, "'s'.*too large"),
}
# fmt: on


def one_sentence(text: str) -> bool:
    return text.endswith(".") and "\n" not in text and "Traceback" not in text


@pytest.mark.parametrize("name", BROKEN)
def test_broken_models(name: str, tmp_path: pathlib.Path) -> None:
    make, kind, words = BROKEN[name]
    model = make()
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())
    for source in (path, model):
        if name == "external data of a proto" and source is path:
            continue
        with pytest.raises(AmpError, match=words) as raised:
            io.load(source)
        assert raised.type is kind
        assert one_sentence(str(raised.value))


def test_valid_model_loads() -> None:
    """The table above breaks this one in one place each."""
    assert len(io.load(plain()).graph) == 1


@pytest.mark.parametrize("seed", range(20))
def test_random_bytes(seed: int, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(np.random.default_rng(seed).bytes(1 << seed % 12))
    with pytest.raises(ModelError) as raised:
        io.load(path)
    assert one_sentence(str(raised.value))


def test_every_truncation_is_noticed(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "m.onnx"
    data = plain().SerializeToString()
    for size in range(len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(ModelError) as raised:
            io.load(path)
        assert one_sentence(str(raised.value))
    assert len(data) > 90


def test_no_file(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UsageError, match="no file"):
        io.load(tmp_path / "m.onnx")
    with pytest.raises(UsageError, match="cannot be read"):
        io.load(tmp_path)


def external(folder: pathlib.Path, **entries: object) -> pathlib.Path:
    model = plain()
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=str(value))
    path = folder / "m.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def test_external_data_inside_the_folder(tmp_path: pathlib.Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "w.bin").write_bytes(np.array([9, 1, 2, 3], np.float32).tobytes())
    (tmp_path / "link.bin").symlink_to("sub/w.bin")
    for location in ("sub/w.bin", "link.bin", "sub/../sub/w.bin"):
        path = external(tmp_path, location=location, offset=4, length=12)
        tensor = io.load(path).graph.initializers["w"].const_value
        assert tensor is not None
        np.testing.assert_array_equal(tensor.numpy(), np.array([1, 2, 3], np.float32))


BAD_PLACES = {
    "missing": ({"location": "none.bin"}, "'none.bin', which is missing"),
    "nowhere": ({}, "outside the model's folder"),
    "too short": ({"location": "w.bin", "offset": 4}, "needs bytes 4 to 16 of 'w.bin', which has 12"),
    "negative offset": ({"location": "w.bin", "offset": -4}, "negative offset -4"),
    "wrong length": ({"location": "w.bin", "length": 8}, "needs 12 bytes of external data and declares 8"),
    "no number": ({"location": "w.bin", "offset": "x"}, "no number"),
    "parent": ({"location": "../outside.bin"}, "outside the model's folder"),
    "absolute": ({"location": "/etc/hostname"}, "outside the model's folder"),
    "symlink": ({"location": "out.bin"}, "outside the model's folder"),
    "symlinked folder": ({"location": "up/outside.bin"}, "outside the model's folder"),
    "hard link": ({"location": "hard.bin"}, "hard link"),
    "folder": ({"location": "sub"}, "no file"),
}


@pytest.mark.parametrize("name", BAD_PLACES)
def test_external_data_elsewhere(name: str, tmp_path: pathlib.Path) -> None:
    entries, words = BAD_PLACES[name]
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    data = np.ones(3, np.float32).tobytes()
    (tmp_path / "outside.bin").write_bytes(data)
    (folder / "w.bin").write_bytes(data)
    (folder / "out.bin").symlink_to(tmp_path / "outside.bin")
    (folder / "up").symlink_to(tmp_path)
    os.link(tmp_path / "outside.bin", folder / "hard.bin")
    with pytest.raises(ModelError, match=words) as raised:
        io.load(external(folder, **entries))
    assert "'w'" in str(raised.value)
    assert one_sentence(str(raised.value))
