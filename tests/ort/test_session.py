"""Sessions: every form of a model, bfloat16, options and errors."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import pathlib
import sys

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper, parser

from onnxamp.errors import DataError, ModelError, UnsupportedError, UsageError
from onnxamp.ort import providers, session
from onnxamp.ort.binding import Binding
from onnxamp.ort.session import SessionConfig, open_session, run, session_options


def proto(text: str) -> onnx.ModelProto:
    return parser.parse_model(f'<ir_version: 10, opset_import: ["": 20]> {text}')


DOUBLE = "g (float[N] x) => (float[N] y) { y = Add(x, x) }"


@pytest.mark.parametrize("form", ["path", "str", "bytes", "proto", "ir"])
def test_every_form_of_a_model(form: str, tmp_path: pathlib.Path) -> None:
    model = proto(DOUBLE)
    path = tmp_path / "m.onnx"
    onnx.save(model, path)
    forms = {"path": path, "str": str(path), "bytes": path.read_bytes(), "proto": model, "ir": ir.from_proto(model)}
    got = run(open_session(forms[form], SessionConfig(provider="cpu")), {"x": np.array([1.5], np.float32)})
    np.testing.assert_array_equal(got["y"], [3])


def test_external_data(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An ir.Model whose weights lie in a file, and one that is too large to travel in one message."""
    weight = numpy_helper.from_array(np.arange(400, dtype=np.float32), "w")
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", 1, [400])],
        [helper.make_tensor_value_info("y", 1, [400])],
        [weight],
    )
    model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 20)])
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    feeds = {"x": np.ones(400, np.float32)}
    external = run(open_session(ir.load(tmp_path / "m.onnx")), feeds)["y"]
    monkeypatch.setattr(session, "_INLINE_LIMIT", 100)
    large = run(open_session(onnx.load(tmp_path / "m.onnx")), feeds)["y"]
    np.testing.assert_array_equal(external, np.arange(400) + 1)
    np.testing.assert_array_equal(large, np.arange(400) + 1)
    (tmp_path / "m.data").unlink()
    with pytest.raises(ModelError, match=r"m\.data"):
        open_session(ir.load(tmp_path / "m.onnx"))


def test_bfloat16_on_both_sides() -> None:
    model = proto("g (bfloat16[2,N] x, float[M] z) => (bfloat16[2,N] y, float[M] w, bfloat16[A] e) "
                  "{ y = Identity(x)  w = Relu(z)  s = Constant <value_ints = [-1]> ()  e = Reshape(x, s) }")  # fmt: skip
    x = np.array([[1, 2, 3], [np.inf, np.nan, -0.0]]).astype(ml_dtypes.bfloat16)
    got = run(open_session(model), {"x": x[:, ::-1], "z": -np.ones(3, np.float32)})
    assert got["y"].dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(got["y"].view(np.uint16), x[:, ::-1].view(np.uint16))
    empty = run(open_session(model), {"x": x[:, :0], "z": np.ones(0, np.float32)}, ["e"])
    assert list(empty) == ["e"]
    assert empty["e"].shape == (0,)


def test_bfloat16_beside_sequences() -> None:
    x = np.array([1, 2]).astype(ml_dtypes.bfloat16)
    into = proto("g (bfloat16[N] x) => (seq(float[N]) s) { y = Cast <to = 1> (x)  s = SequenceConstruct(y, y) }")
    got = run(open_session(into), {"x": x})["s"]
    np.testing.assert_array_equal(got[1], [1, 2])
    both = open_session(
        proto("g (bfloat16[N] x) => (bfloat16[N] z, seq(float[N]) s) "
              "{ z = Identity(x)  y = Cast <to = 1> (x)  s = SequenceConstruct(y, y) }")
    )  # fmt: skip
    with pytest.raises(UnsupportedError, match="one by one"):
        run(both, {"x": x})
    np.testing.assert_array_equal(run(both, {"x": x}, ["s"])["s"][0], [1, 2])
    np.testing.assert_array_equal(run(both, {"x": x}, ["z"])["z"], x)


ERRORS = {
    "missing file": (lambda: open_session("/no/such.onnx"), ModelError, "No such model file"),
    "not protobuf": (lambda: open_session(b"no model"), ModelError, "cannot load"),
    "invalid graph": (lambda: open_session(proto("g (float[N] x) => (float[N] y) { y = Relu(q) }")), ModelError, "'q'"),
    "no kernel": (
        lambda: open_session(proto("g (bfloat16[N] x) => (bfloat16[N] y) { y = Relu(x) }")),
        UnsupportedError,
        "Relu",
    ),
    "unknown operator": (
        lambda: open_session(proto("g (float[N] x) => (float[N] y) { y = Relo(x) }")),
        UnsupportedError,
        "the model cannot run: ONNX Runtime does not know its operator Relo",
    ),
    "operator of another library": (
        lambda: open_session(
            parser.parse_model(
                '<ir_version: 8, opset_import: ["" : 17, "acme" : 1]> g (float[N] x) => (float[N] y) { y = acme.Weird(x) }'
            ),
            name="a.onnx",
        ),
        UnsupportedError,
        "a.onnx cannot run: ONNX Runtime does not know its operator acme.Weird",
    ),
    "no such provider": (lambda: providers.provider_list("cudda"), UsageError, "'cudda'"),
    "optimization": (lambda: session_options(SessionConfig(optimization="most")), UsageError, "'most'"),
    "missing input": (lambda: run(open_session(proto(DOUBLE)), {}), DataError, "missing ['x']"),
    "unknown input": (lambda: run(open_session(proto(DOUBLE)), {"x": 1, "q": 2}), DataError, "unknown ['q']"),
    "wrong type": (lambda: run(open_session(proto(DOUBLE)), {"x": np.ones(2)}), DataError, "double"),
    "wrong rank": (lambda: run(open_session(proto(DOUBLE)), {"x": np.ones((2, 2), np.float32)}), DataError, "rank"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_are_one_sentence(case: str, capfd: pytest.CaptureFixture[str]) -> None:
    action, kind, text = ERRORS[case]
    with pytest.raises(kind) as raised:
        action()
    assert text in str(raised.value)
    assert "\n" not in str(raised.value)
    assert capfd.readouterr() == ("", "")


BOTH = "g (bfloat16[N] x, float[N] z) => (bfloat16[N] y, float[N] w) { y = Identity(x)  w = Relu(z) }"
NO_TENSOR = {
    "ragged": [np.ones(2), np.ones(3)],
    "strings": np.array(["a"]),
    "complex": np.ones(2, np.complex128),
    "dates": np.array(["2020-01-01"], "datetime64[D]"),
    "an object": object(),
}


@pytest.mark.parametrize("case", NO_TENSOR)
def test_what_is_no_tensor_is_an_error_of_the_data(case: str) -> None:
    opened = open_session(proto(BOTH), SessionConfig(provider="cpu"))
    with pytest.raises(DataError, match="'z'"):
        run(opened, {"x": np.ones(2, ml_dtypes.bfloat16), "z": NO_TENSOR[case]})
    with pytest.raises(DataError):
        run(open_session(proto(DOUBLE)), {"x": NO_TENSOR[case]})


@pytest.mark.parametrize("kind", [MemoryError, TypeError, KeyError])
@pytest.mark.parametrize("place", ["converting", "running", "loading", "bound"])
def test_what_is_neither_the_models_nor_the_datas_fault_is_not_blamed_on_them(
    place: str, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    import onnxruntime

    def fail(*arguments: object, **options: object) -> None:
        raise kind("not yours")

    model, feeds = proto(BOTH), {"x": np.ones(2, ml_dtypes.bfloat16), "z": np.ones(2, np.float32)}
    opened = open_session(model, SessionConfig(provider="cpu"))
    actions = {
        "converting": lambda: run(opened, feeds),
        "running": lambda: run(opened, feeds),
        "loading": lambda: open_session(model, SessionConfig(provider="cpu")),
        "bound": lambda: Binding(opened).run(),
    }
    targets = {
        "converting": (session.np, "ascontiguousarray"),
        "running": (onnxruntime.InferenceSession, "run_with_ort_values"),
        "loading": (onnxruntime, "InferenceSession"),
        "bound": (onnxruntime.InferenceSession, "run_with_iobinding"),
    }
    monkeypatch.setattr(*targets[place], fail)
    with pytest.raises(kind, match="not yours"):
        actions[place]()


MAKES = "g (int64[1] n) => (float[N] y) { y = ConstantOfShape(n) }"


@pytest.mark.parametrize("place", ["running", "loading", "bound", "feeding"])
def test_memory_that_the_runtime_lacks_is_no_error_of_model_or_data(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says so in exceptions that it raises for bad values as well."""
    import onnxruntime

    def fail(*arguments: object, **options: object) -> None:
        raise RuntimeError("CUDA failure 2: out of memory ; GPU=0 ; expr=cudaMalloc((void**)&p, size);")

    opened, much = open_session(proto(MAKES)), {"n": np.array([1 << 45])}  # 128 TiB: more than an address can name
    if place == "running":
        with pytest.raises(MemoryError, match=r"ConstantOfShape.*140737488355328"):
            run(opened, much)
    elif place == "bound":
        binding = Binding(opened)
        binding.feed("n", much["n"])
        binding.fetch("y")
        with pytest.raises(MemoryError, match=r"ConstantOfShape.*140737488355328"):
            binding.run()
    elif place == "loading":
        monkeypatch.setattr(onnxruntime, "InferenceSession", fail)
        with pytest.raises(MemoryError, match="out of memory"):
            open_session(proto(MAKES))
    else:
        monkeypatch.setattr(onnxruntime.OrtValue, "ortvalue_from_numpy", fail)
        with pytest.raises(MemoryError, match="out of memory"):
            run(
                open_session(proto(BOTH), SessionConfig(provider="cpu")),
                {"x": np.ones(2, ml_dtypes.bfloat16), "z": np.ones(2, np.float32)},
            )


def test_options_reach_the_runtime() -> None:
    options = session_options(
        SessionConfig(
            optimization="basic",
            threads=3,
            memory_pattern=False,
            deterministic=True,
            config={"session.disable_prepacking": "1"},
        )
    )
    assert options.graph_optimization_level.name == "ORT_ENABLE_BASIC"
    assert options.intra_op_num_threads == 3
    assert not options.enable_mem_pattern
    assert options.use_deterministic_compute
    assert options.get_session_config_entry("session.disable_prepacking") == "1"


BEGINNINGS = {
    "none": (DOUBLE, False),
    "input": ("g (float16[N] x) => (float16[N] y) { y = Relu(x) }", True),
    "cast": ("g (float[N] x) => (float[N] y) { h = Cast<to=10>(x) r = Relu(h) y = Cast<to=1>(r) }", True),
    "bf16": ("g (float[N] x) => (float[N] y) { h = Cast<to=16>(x) y = Cast<to=1>(h) }", True),
    "initializer": (
        "g (int64[N] x) => (float[N,1] y) <float16[1,1] w = {1}> { z = Gather(w, x) y = Cast<to=1>(z) }",
        True,
    ),
    "constant": ("g (float[N] x) => (float[1] y) { c = Constant<value=float16[1] {1}>() y = Cast<to=1>(c) }", True),
    "body": (
        "g (bool b, float[N] x) => (float[N] y) { y = If(b) <then_branch = t () => (float[N] u) "
        "{ h = Cast<to=10>(x) u = Cast<to=1>(h) }, else_branch = e () => (float[N] v) { v = Relu(x) }> }",
        True,
    ),
    "sequence": ("g (seq(float16[N]) x) => (int64 y) { y = SequenceLength(x) }", True),
    "int attribute": ("g (float[N,20] x) => (float[N,20] y) { y = Softmax<axis=1>(x) }", False),
}


@pytest.mark.parametrize("case", BEGINNINGS)
def test_16_bit_models_get_a_level_that_is_safe(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever opens a session on the CPU without naming a level; at `all` the runtime may end the process."""
    text, low = BEGINNINGS[case]
    levels = []
    real = session.session_options
    monkeypatch.setattr(session, "session_options", lambda config: levels.append(config.optimization) or real(config))
    open_session(proto(text), SessionConfig(provider="cpu"))
    open_session(proto(text), SessionConfig(provider="cpu", optimization="all"))
    assert levels == ["extended" if low else "auto", "all"]


def test_nodes_run_in_the_order_of_the_file_when_asked(tmp_path: pathlib.Path) -> None:
    """Depth first from the outputs, the branch of the second output is left for last; in the file it comes first."""
    model = proto("""g (float[4] x) => (float[4] late, float[4] early) {
        a = Exp(x)
        early = Neg(a)
        b = Sqrt(a)
        late = Abs(b)
    }""")
    orders = {}
    for file_order in (False, True):
        options = session_options(SessionConfig("cpu", optimization="none", threads=1, file_order=file_order))
        options.enable_profiling, options.profile_file_prefix = True, str(tmp_path / f"{file_order}")
        opened = providers.runtime().InferenceSession(model.SerializeToString(), options)
        opened.run(None, {"x": np.ones(4, np.float32)})
        events = json.loads(pathlib.Path(opened.end_profiling()).read_text())
        orders[file_order] = [e["args"]["op_name"] for e in events if e["name"].endswith("_kernel_time")]
    assert orders[True] == ["Exp", "Neg", "Sqrt", "Abs"]
    assert orders[False] != orders[True]


def test_a_node_that_openvino_does_not_read_is_named():
    text = (
        "[OpenVINO-EP] Exception while Reading network: Check 'false' failed at src/frontends/onnx/frontend.cpp:221:\n"
        "While validating ONNX node '<Node(ScatterND): grad/tokens>':\nUnsupported value of attribute: `reduction`."
    )
    error = session._load_error(RuntimeError(text), "model.onnx")
    assert isinstance(error, UnsupportedError)
    told = "OpenVINO does not take ScatterND 'grad/tokens' of model.onnx (Unsupported value of attribute: `reduction`)."
    assert str(error) == told


def test_what_shares_memory_is_imported_where_the_c_library_has_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Windows `CDLL(None)` is a TypeError."""
    asked: list[str | None] = []

    def load(name: str | None) -> ctypes.CDLL:
        if name is None:
            raise TypeError("bad argument type for built-in operation")
        asked.append(name)
        return real(None)

    real = ctypes.CDLL
    spec = importlib.util.find_spec("onnxamp.ort.dlpack")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with monkeypatch.context() as windows:
        windows.setattr(ctypes, "CDLL", load)
        windows.setattr(sys, "platform", "win32")
        spec.loader.exec_module(module)
        assert module._nothing()
    assert asked == ["msvcrt"]
