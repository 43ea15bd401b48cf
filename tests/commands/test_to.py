"""`convert --to`: files taken back to fp32, and from one 16-bit type to the other."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable

import onnx
import pytest

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def files(mlp, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, call: Call) -> None:
    """`net.onnx`, and what a conversion with a 16-bit interface makes of it: `low.onnx`."""
    monkeypatch.chdir(tmp_path)
    mlp(tmp_path / "net.onnx")
    assert call("convert", "net.onnx", "--io", "low", "-o", "low.onnx")[0] == 0


def interface(path: str) -> list[int]:
    """Element types of inputs and outputs."""
    graph = onnx.load(path).graph
    return [value.type.tensor_type.elem_type for value in (*graph.input, *graph.output)]


def test_back_to_fp32(call: Call) -> None:
    code, out, err = call("convert", "low.onnx", "--to", "fp32", "--verify")
    assert (code, err) == (0, "")
    for text in ("low.fp32.onnx", "16-bit results  4 → 0", "PASSED: fp16 emulated strictly"):
        assert text in out
    one, other = onnx.load("net.onnx"), onnx.load("low.fp32.onnx")
    assert [node.name for node in one.graph.node] == [node.name for node in other.graph.node]
    assert interface("low.fp32.onnx") == interface("net.onnx") == [1, 1]
    assert call("convert", "low.onnx", "--to", "fp32")[0] == 2  # the file exists
    assert call("convert", "low.onnx", "--to", "fp32", "-o", "low.onnx", "--force")[0] == 2

    code, out, _ = call("convert", "low.onnx", "--to", "fp32", "--io", "keep", "-o", "kept.onnx", "--json")
    assert code == 0
    found = json.loads(out)
    assert (found["low"], found["casts"]) == ({"before": 4, "after": 1}, {"before": 0, "after": 2})
    assert found["weights"]["after"] == 2 * found["weights"]["before"]
    assert interface("kept.onnx") == [10, 10]

    code, out, _ = call("convert", "net.onnx", "--to", "fp32")
    assert code == 0
    assert "No node of net.onnx has a 16-bit result" in out


TO_BF16 = [((), [16, 16]), (("--io", "keep"), [10, 10]), (("--io", "logits=fp32"), [1, 1]), (("--io", "low"), [16, 16])]


@pytest.mark.parametrize(("io", "types"), TO_BF16, ids=str)
def test_to_the_other_type(call: Call, io: tuple[str, ...], types: list[int]) -> None:
    code, out, _ = call("convert", "low.onnx", "--to", "bf16", "--target", "any", *io, "--verify")
    assert code == 0
    assert "PASSED: bf16 emulated strictly" in out
    assert "2 of 2 in 16 bits" in out
    assert interface("low.O2.bf16.onnx") == types
    weights = {tensor.name: tensor.data_type for tensor in onnx.load("low.O2.bf16.onnx").graph.initializer}
    assert (weights["fc1.weight"], weights["MatMul_7"]) == (16, 16)


def test_to_another_level_with_plan_policy_and_reports(call: Call) -> None:
    """The way of the message that a converted file gives."""
    code, _, err = call("convert", "low.onnx", "--level", "O1")
    assert code == 2
    assert "--to fp32, fp16 or bf16" in err
    assert call("convert", "low.onnx", "--to", "fp16", "--plan-only")[0] == 0
    reports = ("--report", "page.html", "--report", "found.json")
    assert call("convert", "low.onnx", "--to", "fp16", "--policy", "low.O2.fp16.policy.toml", *reports)[0] == 0
    assert json.loads(pathlib.Path("found.json").read_text(encoding="utf-8"))["model"] == "low.onnx"
    assert pathlib.Path("page.html").stat().st_size > 10_000
    assert (
        call("convert", "low.onnx", "--to", "fp16", "--level", "O1", "--calibrate", "made-up", "--io", "keep")[0] == 0
    )


REFUSED = {
    "--to fp32 --level O2": "--level is about what becomes 16-bit",
    "--to fp32 --keep-op Gemm": "--keep-op is about what becomes 16-bit",
    "--to fp32 --io low": "write --io keep",
    "--to fp32 --dim batch=2": "add --verify",
    "--to bf16 --dtype bf16": "leave --dtype out",
    "--to fp16 --auto --tolerance cosine=0.99": "write one with --to fp32",
}


@pytest.mark.parametrize("options", REFUSED)
def test_refused(call: Call, options: str) -> None:
    before = sorted(pathlib.Path().iterdir())
    code, _, err = call("convert", "low.onnx", *options.split())
    assert code == 2
    assert REFUSED[options] in err
    assert err.count("\n") == 1
    assert sorted(pathlib.Path().iterdir()) == before


def test_a_16_bit_sequence_becomes_fp32(call: Call) -> None:
    """Sequences have no place in --io, and the type of the tensors beside them is changed all the same."""
    value, items = onnx.ValueInfoProto(name="x"), onnx.ValueInfoProto(name="items")
    value.type.CopyFrom(onnx.helper.make_tensor_type_proto(10, [2, 3]))
    items.type.CopyFrom(onnx.helper.make_sequence_type_proto(onnx.helper.make_tensor_type_proto(10, None)))
    nodes = [onnx.helper.make_node("SequenceConstruct", ["x", "x"], ["items"])]
    model = onnx.helper.make_model(onnx.helper.make_graph(nodes, "g", [value], [items]), ir_version=10)
    onnx.save(model, "items.onnx")
    code, out, _ = call("convert", "items.onnx", "--to", "bf16", "--target", "any", "--json")
    assert code == 0
    (warning,) = (text for text in json.loads(out)["warnings"] if "Of inputs and outputs" in text)
    assert "only tensors become bf16, these become fp32: items (" in warning
    graph = onnx.load("items.O2.bf16.onnx").graph
    assert graph.input[0].type.tensor_type.elem_type == 16
    assert graph.output[0].type.sequence_type.elem_type.tensor_type.elem_type == 1
