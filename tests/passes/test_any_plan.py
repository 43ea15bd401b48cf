"""Whatever the plan decides within the schemas, the passes give a valid model that computes the same."""

import random

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented

from onnxamp.dtypes import BY_NAME, FP16, FP32
from onnxamp.model import io, types
from onnxamp.model.inlining import inline_float_functions
from onnxamp.model.units import Unit, all_nodes, type_graph
from onnxamp.passes.annotate import AnnotatePass
from onnxamp.passes.casts import InsertCastsPass
from onnxamp.passes.constants import ConvertConstantsPass
from onnxamp.passes.retype import RetypePass
from onnxamp.policy import codes, targets
from onnxamp.policy.legality import choices
from onnxamp.policy.plan import Decision, Options, Plan

CONSTANT = "Constant <value = float {1.0}> ()"
GRAPHS = {
    "chain with shared and tied weights": """g (float[2,4] x) => (float[2,4] y, float[2,4] z)
        <float[4,4] w = {1,0,2,0, 0,1,0,1, 1,1,0,0, 2,0,0,1}, float[4] b = {1,2,3,4}> {
        a = MatMul(x, w)  c = Add(a, b)  t = Transpose(w)  d = MatMul(c, t)  y = Mul(d, b)  z = Softmax(a) }""",
    "output also read, input also output": """g (float[2,4] x) => (float[2,4] y, float[2,4] x, float[2,4] z)
        { y = Relu(x)  h = Sigmoid(y)  z = Add(h, y) }""",
    "initializer as output": """g (float[2] x) => (float[2] y, float[2] w) <float[2] w = {1,2}> { y = Mul(x, w) }""",
    "constants in every form": """g (float[2,2] x) => (float[2,2] y) {
        a = Constant <value_float = 2.5> ()  b = Constant <value_floats = [1.0, 2.0]> ()  c = Constant <value = float[2] {3, 4}> ()
        d = Mul(x, a)  e = Add(d, b)  f = Sub(e, c)  h = Mul(f, b)  y = Add(h, x) }""",
    "Casts in the source": """g (int64[2] i, float[2] x) => (float[2] y, float[2] z) {
        f = Cast <to = 1> (i)  a = Add(f, x)  d = Cast <to = 11> (a)  e = Cast <to = 1> (d)  y = Mul(e, x)
        l = Cast <to = 10> (x)  z = CastLike(l, e) }""",
    "types from attributes": """g (int64[1] n, float[3,3] x) => (float[3,3] y, float[k] z, float[3,3] u) {
        e = EyeLike(x)  a = Add(x, e)  o = ConstantOfShape(n)  f = ConstantOfShape <value = float[1] {2}> (n)  z = Add(o, f)
        r = RandomNormalLike <seed = 1.0, scale = 0.0001> (a)  y = Add(a, r)
        j = Cast <to = 7> (x)  k = EyeLike <dtype = 1> (j)  u = Mul(k, x) }""",
    "If with captures": """g (bool c, float[2] x) => (float[2] y) <float[2] w = {1,2}> {
        a = Relu(x)
        r = If (c) <then_branch = t () => (float[2] p) { p = Mul(a, w) },
                    else_branch = e () => (float[2] q) <float[2] v = {3,4}> { h = Add(a, v)  q = Mul(h, w) }>
        y = Add(r, a) }""",
    "nested If": """g (bool c, float[2] x) => (float[2] y) {
        a = Neg(x)
        y = If (c) <then_branch = t () => (float[2] p) {
                        b = Exp(a)
                        p = If (c) <then_branch = tt () => (float[2] pp) { pp = Mul(a, b) },
                                    else_branch = te () => (float[2] pq) { pq = Identity(b) }> },
                    else_branch = e () => (float[2] q) { q = Sigmoid(a) }> }""",
    "Loop with float state and scan": """g (int64 n, float[2] x) => (float[2] y, float[k, 2] s) <float[2] w = {0.5,2}> {
        c = Constant <value = bool {1}> ()  a = Relu(x)
        y, s = Loop (n, c, a) <body = b (int64 i, bool ci, float[2] st) => (bool co, float[2] so, float[2] out) {
            co = Identity(ci)  h = Mul(st, w)  so = Add(h, x)  out = Sigmoid(st) }> }""",
    "Loop that hands its state through": """g (int64 n, float[2] x) => (float[2] y, float[2] z) {
        c = Constant <value = bool {1}> ()
        y, z = Loop (n, c, x, x) <body = b (int64 i, bool ci, float[2] p, float[2] q) => (bool co, float[2] po, float[2] q) {
            co = Identity(ci)  po = Add(p, q) }> }""",
    "Scan": """g (float[2] h, float[3,2] x) => (float[2] y, float[3,2] z) <float[2] w = {1,0.5}> {
        y, z = Scan <num_scan_inputs = 1, body = b (float[2] s, float[2] xi) => (float[2] so, float[2] zo) {
            a = Mul(xi, w)  so = Add(s, a)  zo = Tanh(so) }> (h, x) }""",
    "sequences": """g (float[4,2] x) => (float[2,2] y) {
        a = Relu(x)  s = SplitToSequence (a, two)  i = Constant <value = int64 {1}> ()  e = SequenceAt(s, i)  y = Mul(e, e) }""",
    "empty optional operands": """g (float[2,2,3] x) => (float[2,1,2,2] y, float[1,2,2] h)
        <float[1,8,3] w, float[1,8,2] r> { a = Relu(x)  y, h, cell = LSTM <hidden_size = 2> (a, w, r)  k = Relu(cell) }""",
    "omitted outputs": """g (float[2,2,3] x) => (float[1,2,2] h)
        <float[1,8,3] w, float[1,8,2] r> { a = Relu(x)  "", h = LSTM <hidden_size = 2> (a, w, r) }""",
    "separate operand types": """g (float[1,2,2,2] x, float[1,2,4,4] m) => (float[1,2,4,4] y)
        <float[4] scales = {1,1,2,2}, float[2] s = {1,2}, float[2] b = {0,1}, float[2] u = {0,0}, float[2] v = {1,2}, float e = {2}> {
        p = Resize (x, "", scales)  q = Pow(p, e)  n = BatchNormalization(q, s, b, u, v)  y = Add(n, m) }""",
    "quantized": """g (float[2,4] x) => (float[2,4] y) <float s = {0.1}, uint8 z = {128}> {
        a = Relu(x)  q = QuantizeLinear(a, s, z)  d = DequantizeLinear(q, s, z)  y = Mul(d, x) }""",
    "double beside float": """g (double[2] d, float[2] x) => (double[2] e, float[2] y) {
        f = Cast <to = 1> (d)  y = Add(f, x)  k = Cast <to = 11> (y)  e = Add(k, d) }""",
    "shape reads": """g (float[2,4] x) => (float[4,2] y) {
        a = Relu(x)  s = Shape(a)  i = Constant <value = int64[2] {1,0}> ()  r = Gather(s, i)  y = Reshape(a, r) }""",
    "names taken": """g (float[2] x) => (float[2] y, float[2] x__fp16) { x__fp16 = Relu(x)  x__fp32 = Exp(x)  y = Mul(x, x__fp32) }""",
    "floats that give bools": """g (float[2] x) => (bool[2] y, int64[1] z) <float[2] w = {0,1}> {
        a = Mul(x, w)  y = Greater(a, w)  z = ArgMax(a) }""",
}


def model(name: str) -> onnx.ModelProto:
    graph = onnx.parser.parse_graph(GRAPHS[name])
    rng = np.random.default_rng(1)
    given = {tensor.name for tensor in graph.initializer}
    if name == "sequences":
        graph.initializer.append(numpy_helper.from_array(np.array(2), "two"))
    for index, value in reversed(list(enumerate(graph.value_info))):
        dims = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        if value.name not in given:  # a weight without values in the text
            graph.initializer.append(numpy_helper.from_array(rng.standard_normal(dims, np.float32), value.name))
        del graph.value_info[index]
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 19)])


def feeds(source: onnx.ModelProto) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(2)
    made = {}
    for value in source.graph.input:
        dims = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        kind = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        made[value.name] = (rng.integers(1, 8, dims) / 4 if kind.kind == "f" else np.full(dims, 3)).astype(kind)
    return made


def run(proto: onnx.ModelProto, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    wanted = {TensorProto.FLOAT16: np.float16, TensorProto.FLOAT: np.float32}
    kinds = {value.name: value.type.tensor_type.elem_type for value in proto.graph.input}
    cast = {
        name: inputs[name].astype(wanted.get(kind, inputs[name].dtype))
        for name, kind in kinds.items()
        if name in inputs
    }
    try:
        session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except NotImplemented:  # no fp16 kernel on the CPU
        return [np.asarray(output) for output in ReferenceEvaluator(proto).run(None, cast)]
    return [np.asarray(output) for output in session.run(None, cast)]


def random_plan(source: ir.Model, seed: int, options: Options) -> Plan:
    """A precision for every unit, drawn among what the schemas allow."""
    draw = random.Random(seed)
    graph = type_graph(source)
    decisions: dict[Unit, Decision] = {}
    share = draw.choice([0.2, 0.5, 0.8])
    for node in graph.of:
        legal = choices(node, graph, FP16, targets.table("any"))
        decisions.update(legal.blocked)
        want = {unit for unit in legal.units if draw.random() < share}
        best = frozenset(want)
        if legal.allowed is not None:
            best = max(legal.allowed, key=lambda option: len(option & want) - len(option - want))
        decisions.update({unit: Decision("fp16" if unit in best else "fp32", codes.LEVEL_O3) for unit in legal.units})
    for unit in graph.units:
        if unit.node is None:
            low = unit.fixed == "interface" and unit.dtype == ir.DataType.FLOAT and draw.random() < 0.3
            name = (unit.writes or [read.value for read in unit.reads])[0].name
            others = [
                other
                for other in decisions
                if other.node is None and (other.writes or [read.value for read in other.reads])[0].name == name
            ]
            decisions[unit] = decisions[others[0]] if others else Decision("fp16" if low else "fp32", codes.INTERFACE)
            if unit.dtype != ir.DataType.FLOAT:
                decisions[unit] = Decision.of_source(unit)
    return Plan(graph, options, {unit: decisions[unit] for unit in graph.units})


def rewritten(source: onnx.ModelProto, seed: int, weights: str) -> tuple[ir.Model, Plan]:
    loaded = io.load(source)
    types.infer(loaded)
    plan = random_plan(loaded, seed, Options(weights=weights, level="O2", target="any"))
    for rewrite in (RetypePass, ConvertConstantsPass, InsertCastsPass, AnnotatePass):
        rewrite(plan)(loaded)
    return loaded, plan


@pytest.mark.parametrize("name", GRAPHS)
def test_any_plan_is_valid(name: str) -> None:
    source = model(name)
    onnx.checker.check_model(source, full_check=True)
    inputs = feeds(source)
    expected = run(source, inputs)
    lowered = 0
    for seed in range(12):
        result, plan = rewritten(source, seed, ("convert", "cast")[seed % 2])
        proto = io.to_proto(result)
        onnx.checker.check_model(proto, full_check=True)
        assert [value.name for value in proto.graph.output] == [value.name for value in source.graph.output]
        assert [value.name for value in proto.graph.input] == [value.name for value in source.graph.input]
        for got, want in zip(run(proto, inputs), expected, strict=True):
            assert got.shape == want.shape
            np.testing.assert_allclose(got.astype(want.dtype), want, rtol=1e-2, atol=1e-2)
        check_types(result, plan)
        check_casts(result)
        lowered += sum(decision.precision != FP32.name for decision in plan.decisions.values())
    assert lowered > 0 or name == "sequences"


def check_types(result: ir.Model, plan: Plan) -> None:
    """Every unit really reads and writes its precision in the result."""
    for unit in plan.graph.units:
        kind = BY_NAME[plan.decisions[unit].precision].ir
        assert all(value.dtype == kind for value in unit.writes)
        for read in unit.reads:
            value = read.site.inputs[read.index] if isinstance(read.site, ir.Node) else read.site.outputs[read.index]
            assert value is not None
            assert value.dtype == kind


def check_casts(result: ir.Model) -> None:
    """One Cast for a value and precision, right behind its producer, with names that are nobody else's."""
    nodes = list(all_nodes(result.graph))
    names = [node.name for node in nodes if node.name]
    assert len(set(names)) == len(names)
    casts = [node for node in nodes if "onnxamp.cast" in node.metadata_props]
    keys = [(node.inputs[0], node.outputs[0].dtype) for node in casts]
    assert len(set(keys)) == len(keys)
    for cast in casts:
        source = cast.inputs[0]
        assert source is not None
        assert cast.graph is source.graph
        before = list(cast.graph)[: list(cast.graph).index(cast)]
        while before and "onnxamp.cast" in before[-1].metadata_props:
            before.pop()
        assert (before[-1] if before else None) is source.producer() or source.producer() is None


@pytest.mark.parametrize("name", GRAPHS)
def test_a_plan_that_changes_nothing_changes_nothing(name: str) -> None:
    source = model(name)
    loaded = io.load(source)
    before = io.to_proto(loaded).SerializeToString(deterministic=True)
    declared = {value: value.shape for node in all_nodes(loaded.graph) for value in node.outputs}
    declared |= {value: value.shape for value in (*loaded.graph.inputs, *loaded.graph.outputs)}
    kinds = {value: value.type for value in declared}
    types.infer(loaded)
    graph = type_graph(loaded)
    plan = Plan(graph, Options(level="O0"), {unit: Decision.of_source(unit) for unit in graph.units})
    for rewrite in (RetypePass, ConvertConstantsPass, InsertCastsPass):
        assert not rewrite(plan)(loaded).modified
    for value, shape in declared.items():
        value.shape, value.type = shape, kinds[value]
    assert io.to_proto(loaded).SerializeToString(deterministic=True) == before


def test_below_ir_4_copies_are_listed_as_inputs() -> None:
    source = model("chain with shared and tied weights")
    source.ir_version = 3
    source.opset_import[0].version = 8
    for tensor in source.graph.initializer:
        source.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    names = [value.name for value in source.graph.input]
    added = 0
    for seed in range(8):
        result, _ = rewritten(source, seed, "convert")
        proto = io.to_proto(result)
        onnx.checker.check_model(proto, full_check=True)
        constants = {tensor.name for tensor in proto.graph.initializer}
        inputs = [value.name for value in proto.graph.input]
        assert inputs[: len(names)] == names
        assert constants <= set(inputs)
        added += len(inputs) - len(names)
        run(proto, {"x": np.ones((2, 4), np.float32)})
    assert added > 0


def test_tied_weights_are_converted_once() -> None:
    source = model("chain with shared and tied weights")
    loaded = io.load(source)
    types.infer(loaded)
    graph = type_graph(loaded)
    heavy = ("MatMul", "Transpose")
    plan = Plan(
        graph,
        Options(),
        {
            unit: Decision("fp16" if unit.node is not None and unit.node.op_type in heavy else "fp32", codes.HEAVY)
            for unit in graph.units
        },
    )
    for rewrite in (RetypePass, ConvertConstantsPass, InsertCastsPass):
        rewrite(plan)(loaded)
    dtypes = {value.name: value.dtype for value in loaded.graph.initializers.values()}
    assert dtypes == {"w": ir.DataType.FLOAT16, "b": ir.DataType.FLOAT}


def test_functions_are_inlined_only_where_they_hold_floats() -> None:
    text = """<ir_version: 10, opset_import: ["" : 19, "local" : 1]>
        g (float[2] x, int64[2] i) => (float[2] y, int64[2] j) {
            t = Relu(x)  a = local.Twice(t)  y = local.Twice(a)  j = local.Next(i) }
        <domain: "local", opset_import: ["" : 19]> Twice (v) => (r) { t = Constant <value_float = 2.0> ()  r = Mul(v, t) }
        <domain: "local", opset_import: ["" : 19]> Next (v) => (r) { t = Constant <value_int = 1> ()  r = Add(v, t) }"""
    source = onnx.parser.parse_model(text)
    loaded = io.load(source)
    types.infer(loaded)
    assert inline_float_functions(loaded)
    assert [function.name for function in loaded.functions.values()] == ["Next"]
    names = [value.name for node in all_nodes(loaded.graph) for value in node.outputs]
    assert len(set(names)) == len(names)
    assert {"t", "a", "y", "j"} <= set(names)
    inputs = {"x": np.ones(2, np.float32), "i": np.ones(2, np.int64)}
    for got, want in zip(run(io.to_proto(loaded), inputs), run(source, inputs), strict=True):
        np.testing.assert_array_equal(got, want)
    assert loaded.graph.outputs[0].dtype == TensorProto.FLOAT
