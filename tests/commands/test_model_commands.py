"""The commands on models, as a user meets them: output, files, exit codes."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from onnxamp import cli
from onnxamp.model.preparation import prepared

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> Run:
    """Run `onnxamp` with arguments in an empty folder; gives exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["onnxamp", *arguments])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        out, err = capsys.readouterr()
        return int(stop.value.code or 0), out, err

    return call


@pytest.fixture
def model(tmp_path: pathlib.Path) -> pathlib.Path:
    """A small network with a Softmax between two layers."""
    rng = np.random.default_rng(0)
    text = """<ir_version: 10, opset_import: ["": 20], producer_name: "here">
        g (float[batch,16] x) => (float[batch,8] y)
        { [first] h = MatMul(x, w)  [act] r = Relu(h)  [soft] s = Softmax(r)  [last] y = MatMul(s, v) }"""
    proto = parser.parse_model(text)
    for name, shape in (("w", (16, 64)), ("v", (64, 8))):
        proto.graph.initializer.append(numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name))
    onnx.save(proto, tmp_path / "net.onnx")
    return tmp_path / "net.onnx"


def test_convert_writes_beside_the_input_and_ends_with_a_table(run: Run, model: pathlib.Path) -> None:
    code, out, err = run("convert", "net.onnx")
    assert (code, err) == (0, "")
    assert model.with_name("net.O2.fp16.onnx").exists()
    for text in ("net.O2.fp16.onnx", "2 of 2 in 16 bits", "Casts added", "weights", "traffic", "batch=1", "AMP101 (1)"):
        assert text in out
    code, _, err = run("convert", "net.onnx")
    assert code == 2
    assert "--force" in err
    assert run("convert", "net.onnx", "--force")[0] == 0
    assert run("convert", "net.onnx", "--level", "O1", "--dtype", "bf16")[0] == 0
    assert model.with_name("net.O1.bf16.onnx").exists()
    assert run("convert", "net.onnx", "--level", "auto")[0] == 0
    assert model.with_name("net.O1.fp16.onnx").exists()


def test_convert_raises_the_opset_for_bf16_and_says_so(run: Run, tmp_path: pathlib.Path) -> None:
    text = """<ir_version: 8, opset_import: ["": 17]> g (float[1,1,8,8] x) => (float[1,1,8,8] y) <float[1,1,1,1] w = {2}>
            { h = Conv(x, w) %s y = Conv(h1, w) }"""
    onnx.save(parser.parse_model(text % "h1 = Relu(h)"), tmp_path / "conv.onnx")
    code, out, err = run("convert", "conv.onnx", "--dtype", "bf16")
    assert (code, err) == (0, "")
    assert "opset 17 → 22" in " ".join(out.split())
    assert onnx.load(tmp_path / "conv.O2.bf16.onnx").opset_import[0].version == 22
    found = json.loads(run("convert", "conv.onnx", "--dtype", "bf16", "--json", "--force")[1])
    assert (found["opset"], found["warnings"]) == ({"before": 17, "after": 22}, [])
    assert json.loads(run("convert", "conv.onnx", "--json", "--force")[1])["opset"] == {"before": 17, "after": 17}


def test_convert_warns_of_an_opset_that_costs_a_kernel(run: Run, tmp_path: pathlib.Path) -> None:
    text = """<ir_version: 8, opset_import: ["": 17]> g (float[1,1,8,8] x) => (float[1,1,8,8] y) <float[1,1,1,1] w = {2}>
            { h = Conv(x, w) [pool] h1 = MaxPool<kernel_shape = [1, 1]>(h) y = Conv(h1, w) }"""
    onnx.save(parser.parse_model(text), tmp_path / "conv.onnx")
    found = json.loads(run("convert", "conv.onnx", "--dtype", "bf16", "--json")[1])
    assert found["opset"] == {"before": 17, "after": 17}
    assert "2 of 2 heavy nodes stay fp32" in found["warnings"][0]
    assert "MaxPool 'pool' blocks" in found["warnings"][0]
    assert "use fp16 or another --target" in found["warnings"][0]
    assert (
        json.loads(run("convert", "conv.onnx", "--dtype", "bf16", "--target", "any", "--json", "--force")[1])["opset"][
            "after"
        ]
        == 22
    )
    assert json.loads(run("convert", "conv.onnx", "--json", "--force")[1])["warnings"] == []


def test_convert_json_reports_and_choices(run: Run, model: pathlib.Path) -> None:
    code, out, _ = run("convert", "net.onnx", "-o", "a.onnx", "--json", "--report", "a.json", "--keep", "first")
    assert code == 0
    found = json.loads(out)
    assert found["heavy"] == {"low": 1, "all": 2}
    assert found["output"] == "a.onnx"
    nodes = {row["node"]: row for row in json.loads(pathlib.Path("a.json").read_text())["nodes"]}
    assert set(nodes) == {"first", "act", "soft", "last"}
    assert nodes["first"]["precision"] == "fp32"
    assert nodes["first"]["code"].startswith("AMP4")
    assert nodes["last"]["precision"] == "fp16"
    code, out, _ = run("convert", "net.onnx", "-o", "b.onnx", "--json", "--io", "low", "--dim", "batch=32")
    assert json.loads(out)["dims"] == {"batch": 32}
    assert onnx.load("b.onnx").graph.input[0].type.tensor_type.elem_type == onnx.TensorProto.FLOAT16


def test_convert_verifies(run: Run, model: pathlib.Path) -> None:
    np.savez("data.npz", x=np.random.default_rng(1).standard_normal((5, 16)).astype(np.float32))
    code, out, _ = run("convert", "net.onnx", "--verify", "--data", "data.npz")
    assert code == 0
    assert "PASSED: fp16 emulated strictly, 1 sample (5 rows) from data.npz." in out
    code, _, err = run("convert", "net.onnx", "-o", "b.onnx", "--data", "data.npz")
    assert code == 2
    assert "--verify" in err


def test_a_conversion_that_cannot_be_verified_is_reported(run: Run, tmp_path: pathlib.Path) -> None:
    """An index that the table does not have shows only when the model runs."""
    ones = ", ".join(["1.0"] * 64)
    proto = parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 20]> g (float[batch,16] x, int64[1] i) => (float[batch,1] y)
        <float[16,4] w = {{{ones}}}> {{ h = MatMul(x, w)  y = Gather <axis = 1> (h, i) }}"""
    )
    onnx.save(proto, tmp_path / "net.onnx")
    np.savez(tmp_path / "far.npz", x=np.zeros((2, 16), np.float32), i=np.array([99]))
    code, out, err = run("convert", "net.onnx", "--verify", "--data", "far.npz", "--report", "r.json")
    assert code == 3
    assert "1 of 1 in 16 bits" in out
    assert "far.npz" in err
    report = json.loads(pathlib.Path("r.json").read_text())
    assert (report["heavy"]["low"], report["verify"]["passed"]) == (1, None)
    assert report["verify"]["error"] in " ".join(err.split())


# What makes samples up, and so must not hear of sizes that only inner values have.
MADE_UP = {
    "calibrated": ("convert", "inner.onnx", "--calibrate", "made-up"),
    "verified": ("convert", "inner.onnx", "--verify"),
    "searched": ("convert", "inner.onnx", "--auto", "--tolerance", "cosine=0.9"),
    "widened": ("convert", "low.onnx", "--to", "fp32", "--verify"),
}


@pytest.mark.parametrize("case", MADE_UP)
def test_sizes_of_inner_values_are_for_the_traffic_model_alone(case: str, run: Run, tmp_path: pathlib.Path) -> None:
    proto = parser.parse_model(
        """<ir_version: 10, opset_import: ["": 20]> g (float[batch,8] x) => (float[batch,8] y)
        { i = NonZero(x)  k = Cast <to = 1> (i)  s = ReduceMean <keepdims = 0> (k)  y = Mul(x, s) }"""
    )
    onnx.save(proto, tmp_path / "inner.onnx")
    kept = next(str(value.shape[1]) for node in prepared(proto).graph for value in node.outputs if value.name == "i")
    assert run("convert", "inner.onnx", "--level", "O3", "-o", "low.onnx")[0] == 0
    before = sorted(tmp_path.iterdir())
    code, _, err = run(*MADE_UP[case], "-o", "out.onnx", "--dim", "bach=2")
    assert (code, sorted(tmp_path.iterdir())) == (2, before)
    assert "The model has no dimension 'bach'; did you mean 'batch'?" in err
    code, out, err = run(*MADE_UP[case], "-o", "out.onnx", "--dim", f"{kept}=5", "--dim", "batch=2", "--json")
    assert (code, err) == (0, "")
    assert "batch=2" in out or case == "searched"


def test_a_size_is_of_a_name_and_refused_before_the_work(
    run: Run, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proto = parser.parse_model(
        """<ir_version: 10, opset_import: ["": 20]> g (float[a,8] x, float[b,8] z) => (float[c,8] y)
        { t = Concat <axis = 0> (x, z) y = Relu(t) }"""
    )
    onnx.save(proto, tmp_path / "joined.onnx")
    monkeypatch.setattr("onnxamp.evidence.calibration.calibrate", None)
    assert "a + b" in {str(dim) for node in prepared(proto).graph for dim in node.outputs[0].shape or ()}
    code, _, err = run("convert", "joined.onnx", "--calibrate", "made-up", "--dim", "a + b=5")
    assert (code, "The model has no dimension 'a + b'" in err) == (2, True)


def test_a_widened_file_that_cannot_be_verified_is_reported(run: Run, model: pathlib.Path) -> None:
    np.savez(model.with_name("other.npz"), q=np.zeros((2, 3), np.float32))
    assert run("convert", "net.onnx", "-o", "low.onnx")[0] == 0
    command = ("convert", "low.onnx", "--to", "fp32", "--verify", "--data", "other.npz", "--force")
    code, out, err = run(*command)
    assert code == 3
    assert "low.fp32.onnx" in out
    assert "16-bit results" in out
    _, out, err = run(*command, "--json")
    found = json.loads(out)["verify"]
    assert found["passed"] is None
    assert found["error"] in " ".join(err.split())


WITHOUT_EFFECT = {
    "--max-evals 3": "--max-evals is for --auto",
    "--max-evals 30": "--max-evals is for --auto",
    "--metric m:f": "--metric is for --auto",
    "--tolerance snr=40": "--tolerance is for --auto",
    "--headroom 2": "--headroom is for --calibrate",
    "--auto --tolerance snr=40 --headroom 2": "--headroom is for --calibrate",
    "--auto --tolerance snr=40 --calibrate made-up": "leave --calibrate out",
    "--auto --tolerance snr=40 --plan-only": "leave --plan-only out",
}


@pytest.mark.parametrize("options", WITHOUT_EFFECT)
def test_options_without_effect_are_refused(options: str, run: Run, model: pathlib.Path) -> None:
    code, _, err = run("convert", "net.onnx", *options.split())
    assert code == 2
    assert WITHOUT_EFFECT[options] in err
    assert [path.name for path in model.parent.iterdir()] == ["net.onnx"]


def test_convert_refuses_what_it_cannot_read(run: Run, model: pathlib.Path) -> None:
    pathlib.Path("bad.onnx").write_bytes(model.read_bytes()[:100])
    cases = {
        ("none.onnx",): 2,
        ("bad.onnx",): 3,
        ("net.onnx", "--dim", "batch"): 2,
        ("net.onnx", "--report", "r.txt"): 2,
        ("net.onnx", "--io", "x"): 2,
        ("net.onnx", "--level", "O7"): 2,
        ("net.onnx", "--policy", "none.toml"): 2,
    }
    for arguments, want in cases.items():
        code, out, err = run("convert", *arguments)
        assert (code, out) == (want, ""), arguments
        assert "Traceback" not in err
        assert err.strip().startswith(("Error: ", "Usage: "))
    assert sorted(path.name for path in pathlib.Path().glob("*.onnx")) == ["bad.onnx", "net.onnx"]


def test_inspect(run: Run, model: pathlib.Path) -> None:
    code, out, _ = run("inspect", "net.onnx")
    assert code == 0
    for text in (
        "here",
        "ai.onnx 20",
        "2 MatMul fp32",
        "4 fp32",
        "6.14 kB fp32",
        "x      fp32  [batch, 16]",
        "Softmax",
    ):
        assert text in out
    run("convert", "net.onnx", "-o", "low.onnx")
    found = json.loads(run("inspect", "low.onnx", "--json")[1])
    assert found["converted"]["level"] == "O2"
    assert found["weights"] == {"fp16": 3072}
    assert found["heavy"] == {"MatMul fp16": 2}
    assert found["nodes"] == 4 + sum(found["casts"].values())


def test_explain(run: Run, model: pathlib.Path) -> None:
    code, out, _ = run("explain", "amp101")
    assert code == 0
    assert out.startswith("# AMP101")
    assert run("explain", "AMP999")[0] == 2
    run("convert", "net.onnx", "-o", "low.onnx")
    code, out, _ = run("explain", "low.onnx", "soft")
    assert code == 0
    assert "AMP101" in out
    assert "Softmax" in out
    by_node = json.loads(run("explain", "low.onnx", "last", "--json")[1])
    assert (by_node["precision"], by_node["code"]) == ("fp16", "AMP002")
    by_value = json.loads(run("explain", "low.onnx", "y", "--json")[1])
    assert by_value["op_type"] == "Cast"
    maker = by_value["made_by"]
    assert (maker["node"], maker["op_type"], maker["precision"], maker["code"]) == ("last", "MatMul", "fp16", "AMP002")
    assert "value made by  MatMul 'last', fp16 by AMP002 heavy operator" in run("explain", "low.onnx", "y")[1]
    planned = json.loads(run("explain", "net.onnx", "last", "--level", "O0", "--json")[1])
    assert (planned["precision"], planned["code"]) == ("fp32", "AMP001")
    code, _, err = run("explain", "net.onnx", "sotf")
    assert code == 2
    assert "near it: soft" in err
    assert run("explain", "low.onnx", "soft", "--level", "O1")[0] == 2
    assert run("explain", "a", "b", "c")[0] == 2
    assert "add the name of a node" in run("explain", "net.onnx")[2]


def test_explain_offers_what_begins_with_the_text(run: Run, tmp_path: pathlib.Path) -> None:
    nodes = "[node_layer_norm_17] a = Relu(x) [node_lag] b = Relu(a) [node_max] c = Relu(b) [node_lap] y = Relu(c)"
    proto = parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> g (float[4] x) => (float[4] y) {{ {nodes} }}')
    onnx.save(proto, tmp_path / "n.onnx")
    code, _, err = run("explain", "n.onnx", "node_lay")
    assert code == 2
    assert "near it: node_layer_norm_17" in " ".join(err.split())


def test_emulate_and_verify(run: Run, model: pathlib.Path) -> None:
    run("convert", "net.onnx", "-o", "low.onnx")
    code, out, _ = run("emulate", "low.onnx", "-o", "twin.onnx")
    assert code == 0
    assert "Casts added" in out
    assert run("emulate", "low.onnx", "-o", "twin.onnx")[0] == 2
    kinds = {v.type.tensor_type.elem_type for v in onnx.load("twin.onnx").graph.input}
    assert kinds == {onnx.TensorProto.FLOAT}
    code, out, _ = run("verify", "net.onnx", "twin.onnx", "--samples", "2", "--tolerance", "snr=30,cosine=0.999")
    assert code == 0
    assert "2 samples made up" in out
    code, out, _ = run("verify", "net.onnx", "low.onnx", "--tolerance", "snr=200", "--json")
    assert code == 1
    found = json.loads(out)
    assert not found["passed"]
    assert found["divergence"]["node"] in ("first", "act", "soft", "last")
    code, out, _ = run("verify", "net.onnx", "low.onnx", "--tolerance", "snr=200")
    assert code == 1
    assert "snr" in out
    assert "FAILED (1 of 1 outputs)" in out
    assert "No single node spoils it" in out
    assert run("verify", "net.onnx", "low.onnx", "--data", "none.npz")[0] == 2
    assert run("verify", "net.onnx", "low.onnx", "--tolerance", "snr")[0] == 2
    assert run("verify", "net.onnx", "low.onnx", "--provider", "cuda")[0] == 5


COMMANDS = ["convert", "inspect", "explain", "verify", "emulate", "doctor"]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_an_example(name: str, run: Run) -> None:
    code, out, _ = run(name, "--help")
    assert code == 0
    assert "Example:" in out
    assert f"onnxamp {name} " in out.partition("Example:")[2] + " "
    assert "--json" in out


def test_no_runtime_is_imported(run: Run, model: pathlib.Path) -> None:
    """convert, inspect and explain work where none is installed."""
    code = """
import sys
sys.modules["onnxruntime"] = None
from onnxamp import cli
for arguments in (["convert", "net.onnx", "--force"], ["inspect", "net.onnx"], ["explain", "net.onnx", "soft"],
                  ["emulate", "net.O2.fp16.onnx", "-o", "twin.onnx"], ["verify", "net.onnx", "net.O2.fp16.onnx"]):
    sys.argv = ["onnxamp", *arguments]
    try:
        cli.main()
    except SystemExit as stop:
        print("exit", arguments[0], stop.code or 0)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=model.parent, capture_output=True, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("exit ")]
    assert lines == ["exit convert 0", "exit inspect 0", "exit explain 0", "exit emulate 0", "exit verify 5"]
    assert "onnxamp[cpu]" in done.stderr


def test_a_plan_is_written_edited_and_given_back(run: Run, model: pathlib.Path) -> None:
    code, out, _ = run("convert", "net.onnx", "--plan-only")
    assert code == 0
    plan = pathlib.Path("net.O2.fp16.policy.toml")
    assert str(plan) in out
    assert not pathlib.Path("net.O2.fp16.onnx").exists()
    text = plan.read_text()
    assert '"last" = "low"' in text
    plan.write_text(text.replace('"last" = "low"', '"last" = "fp32"'))
    assert run("convert", "net.onnx", "--policy", str(plan), "--report", "r.html", "--report", "r.json")[0] == 0
    nodes = {row["node"]: row for row in json.loads(pathlib.Path("r.json").read_text())["nodes"]}
    assert (nodes["first"]["precision"], nodes["last"]["precision"]) == ("fp16", "fp32")
    assert "net.onnx → net.O2.fp16.onnx" in pathlib.Path("r.html").read_text()


def test_convert_with_a_failing_verification_exits_with_1(run: Run, tmp_path: pathlib.Path) -> None:
    """O3 lowers a square that leaves fp16's range; the file is written, the place is named."""
    text = """<ir_version: 10, opset_import: ["": 20]> g (float[2,2] x) => (float[2,2] y)
        { [product] h = MatMul(x, x)  [square] s = Mul(h, h)  [root] y = Sqrt(s) }"""
    onnx.save(parser.parse_model(text), tmp_path / "square.onnx")
    np.savez("large.npz", x=np.full((2, 2), 20, np.float32))
    code, out, _ = run("convert", "square.onnx", "--level", "O3", "--verify", "--data", "large.npz")
    assert code == 1
    assert pathlib.Path("square.O3.fp16.onnx").exists()
    assert "First at node 'square'" in out
    assert "FAILED" in out


def test_verify_reports(run: Run, model: pathlib.Path) -> None:
    run("convert", "net.onnx", "-o", "low<b>.onnx")
    code, _, _ = run("verify", "net.onnx", "low<b>.onnx", "--report", "v.html", "--report", "v.json")
    assert code == 0
    assert json.loads(pathlib.Path("v.json").read_text())["passed"] is True
    text = pathlib.Path("v.html").read_text()
    assert "PASSED" in text
    assert "low<b>" not in text
    assert "low&lt;b&gt;.onnx" in text
    assert run("verify", "net.onnx", "low<b>.onnx", "--report", "v.html")[0] == 2
    assert run("verify", "net.onnx", "low<b>.onnx", "--report", "v.txt")[0] == 2


@pytest.mark.parametrize("further", [["--verify"], ["--report", "r.json"], ["--report", "r.html"]], ids=" ".join)
def test_a_plan_refuses_what_needs_a_conversion(further: list[str], run: Run, model: pathlib.Path) -> None:
    code, _, err = run("convert", "net.onnx", "--plan-only", *further)
    assert code == 2
    assert further[0] in err
    assert not pathlib.Path("net.O2.fp16.policy.toml").exists()


def test_functions_are_explained_as_they_are_converted(run: Run, tmp_path: pathlib.Path) -> None:
    text = """<ir_version: 10, opset_import: ["": 17, "local": 1]>
        g (float[2,64] x, float[64,64] w) => (float[2,64] y) { [call] t = local.Block(x, w)  [last] y = local.Block(t, w) }
        <domain: "local", opset_import: ["": 17]> Block (a, b) => (c) { [mm] m = MatMul(a, b)  [act] c = Relu(m) }"""
    onnx.save(parser.parse_model(text), tmp_path / "calls.onnx")
    assert json.loads(run("inspect", "calls.onnx", "--json")[1])["heavy"] == {"MatMul fp32": 2}
    assert run("convert", "calls.onnx", "--report", "r.json")[0] == 0
    rows = json.loads(pathlib.Path("r.json").read_text())["nodes"]
    assert {row["op_type"] for row in rows} == {"MatMul", "Relu"}
    for row in rows:
        code, out, err = run("explain", "calls.onnx", row["node"], "--json")
        assert (code, err) == (0, "")
        found = json.loads(out)
        assert [found[key] for key in ("op_type", "precision", "code")] == [
            row[key] for key in ("op_type", "precision", "code")
        ]
    assert json.loads(run("explain", "calls.onnx", "t", "--json")[1])["op_type"] == "Relu"
    code, _, err = run("explain", "calls.onnx", "call")
    assert code == 2
    assert "call of a function" in err
