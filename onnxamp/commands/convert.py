"""`onnxamp convert`: an FP32 model to mixed precision."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    import onnx_ir as ir

    from onnxamp.conversion import ConvertResult
    from onnxamp.evidence.calibration import Calibration
    from onnxamp.evidence.observe import Observed
    from onnxamp.policy.plan import Plan
    from onnxamp.summary import Summary


@click.command(
    epilog="""Example:

\b
    onnxamp convert model.onnx
    onnxamp convert model.onnx --level O2 --dtype bf16 --keep '*/lm_head/*' --verify
    onnxamp convert model.onnx --plan-only -o policy.toml
    onnxamp convert model.onnx --policy policy.toml --report report.html
    onnxamp convert model.onnx --calibrate samples/
    onnxamp convert model.onnx --auto --tolerance cosine=0.9999 --data samples.npz
    onnxamp convert model.fp16.onnx --to fp32
    onnxamp convert model.fp16.onnx --to bf16 --target any"""
)
@click.argument("model", type=click.Path())
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False),
    help="Default: MODEL.LEVEL.DTYPE.onnx (MODEL.fp32.onnx) beside MODEL.",
)
@click.option("--level", default="O2", show_default=True, type=click.Choice(["O0", "OD", "O1", "O2", "O3", "auto"]),
              help="How much becomes 16-bit: nothing, heavy operators, those and what follows (or auto), least traffic, all.")  # fmt: skip
@click.option(
    "--dtype", default="fp16", show_default=True, type=click.Choice(["fp16", "bf16"]), help="The 16-bit type."
)
@click.option("--to", type=click.Choice(["fp32", "fp16", "bf16"]),
              help="For a MODEL that is 16-bit: take it back to fp32, and from there to a 16-bit type.")  # fmt: skip
@click.option(
    "--io", multiple=True, metavar="keep|low|GLOB=TYPE", help="Types of graph inputs and outputs. Default: keep."
)
@click.option("--target", default="ort-cuda", show_default=True,
              type=click.Choice(["ort-cuda", "ort-cpu", "tensorrt", "openvino", "cann", "any"]),
              help="Whose kernels the result must have.")  # fmt: skip
@click.option(
    "--keep", multiple=True, metavar="PATTERN", help="Nodes that stay fp32: a glob on names or scopes, or re:REGEX."
)
@click.option("--keep-op", multiple=True, metavar="OP", help="Operators that stay fp32.")
@click.option("--lower", multiple=True, metavar="PATTERN", help="Nodes that become 16-bit where that is legal.")
@click.option("--lower-op", multiple=True, metavar="OP", help="Operators that become 16-bit where that is legal.")
@click.option(
    "--dim", multiple=True, metavar="NAME=N", help="Size of a free dimension, for the traffic model and --verify."
)
@click.option("--policy", type=click.Path(dir_okay=False), help="Decisions from a policy file (TOML).")
@click.option("--plan-only", is_flag=True, help="Write the decision for every node as a policy file; convert nothing.")
@click.option("--report", multiple=True, type=click.Path(dir_okay=False), metavar="FILE.json|FILE.html",
              help="Write every decision (.json), or a page that shows the graph (.html).")  # fmt: skip
@click.option("--verify", "verified", is_flag=True, help="Compare the result with the input, as `onnxamp verify` does.")
@click.option(
    "--data", type=click.Path(), help="Inputs for --auto and --verify: an .npz file or a folder. Made up else."
)
@click.option("--calibrate", type=click.Path(), metavar="DATA|made-up",
              help="Decide with the ranges that values reach on these inputs.")  # fmt: skip
@click.option("--headroom", type=click.FloatRange(1), metavar="FACTOR",
              help="For --calibrate: how far inside the 16-bit range counts as ordinary. Default: 8.")  # fmt: skip
@click.option(
    "--auto",
    is_flag=True,
    help="Search for the least traffic within --tolerance (--level auto searches nothing); writes a policy file and a page.",
)
@click.option("--tolerance", multiple=True, metavar="MEASURE=NUMBER",
              help="For --auto: cosine, snr, max_abs, max_rel, top1, kl; bounds on every output of every sample.")  # fmt: skip
@click.option("--metric", metavar="MODULE:FUNCTION",
              help="For --auto: a measure of your own; --tolerance metric=NUMBER is the least that it must give.")  # fmt: skip
@click.option("--max-evals", default=30, show_default=True, type=click.IntRange(1), help="Most evaluations of --auto.")
@click.option("--force", is_flag=True, help="Overwrite files that exist.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    model: str,
    output: str | None,
    to: str | None,
    report: tuple[str, ...],
    verified: bool,
    data: str | None,
    calibrate: str | None,
    headroom: float | None,
    auto: bool,
    tolerance: tuple[str, ...],
    metric: str | None,
    max_evals: int,
    force: bool,
    as_json: bool,
    plan_only: bool,
    dim: tuple[str, ...],
    **choices: Any,
) -> int:
    """Rewrite MODEL to mixed precision: Casts where they are needed, FP32 where it must be, a reason for each decision."""
    from onnxamp import console
    from onnxamp.commands import _auto, _widen
    from onnxamp.commands._options import check_outputs, input_sizes, sizes
    from onnxamp.conversion import convert
    from onnxamp.policy.file import read_policy
    from onnxamp.policy.options import HEADROOM, Options

    dims = sizes(dim)
    source: str | ir.Model = model
    if to is not None:
        _widen.check(to, _given(), choices["io"])
        choices["dtype"] = to
    path = _output(model, output, "auto-search" if auto else choices["level"], choices["dtype"], plan_only)
    _check_use(_given())
    if headroom is not None:
        choices["headroom"] = headroom
    read = [model, data, calibrate, choices["policy"]]
    if verified and data is None:
        from onnxamp.evidence.synthesis import refuse
        from onnxamp.model.io import load

        refuse(load(model))  # before the work, not behind it
    if to == "fp32":
        check_outputs([path], [], force, [model, data])
        return _widen.run(model, path, choices["io"], verified, data, dims, force, as_json)
    check_outputs([path, *(_auto.beside(path)[:2] if auto else ())], report, force, read)
    if to is not None:
        source, choices["io"] = _widen.source(model, to, choices["io"])
    choices["io"] = choices["io"] or "keep"
    made_up = input_sizes(source, dims) if calibrate is not None or auto or verified else {}
    calibration = None
    if calibrate is not None:
        from onnxamp.evidence.calibration import calibrate as measure

        with console.progress(f"calibrating {model}"):
            given = None if calibrate == "made-up" else calibrate
            calibration = measure(source, given, dtype=choices["dtype"], headroom=headroom or HEADROOM, dim=made_up)
        choices["ranges"] = calibration.ranges
    searched = None
    if auto:
        policy = read_policy(choices["policy"]) if choices["policy"] is not None else ()
        options = Options(**{**choices, "dim": tuple(sorted(dims.items())), "policy": policy})
        searched = _auto.run(model, path, options, _auto.asked(tolerance, metric), data, max_evals, made_up)
        result = searched.result
    else:
        with console.progress(f"converting {model}"):
            result = convert(source, dim=dims, **choices)
    if plan_only:
        from onnxamp.commands._options import write_text
        from onnxamp.policy.file import plan_text

        write_text(path, plan_text(result.plan))
        _print_plan(path, result, as_json)
        return 0
    result.save(path, overwrite=force)
    evidence, unverified = None, None
    if verified:
        from onnxamp.errors import AmpError
        from onnxamp.evidence.verification import verify

        try:
            with console.progress("verifying"):
                evidence = verify(source, path, data, dim=made_up, count=4)
        except AmpError as problem:  # the conversion itself is done, and its summary and reports are due
            unverified = problem
    found = {"model": model, "output": path, **summary_dict(result.summary), "warnings": list(result.warnings)}
    if calibration is not None:
        found["calibration"] = calibration_dict(calibration, result.plan)
    if evidence is not None:
        found["verify"] = evidence.to_dict()
    if unverified is not None:
        found["verify"] = {"passed": None, "error": str(unverified)}
    if searched is not None:
        found["auto"] = _auto.to_dict(searched, path)
    for file in report:
        _write_report(file, source, path, found, result)
    if as_json:
        console.print_json(found)
    else:
        rows = [("written", path), *result.summary.rows()] + [("warning", text) for text in result.warnings]
        if calibration is not None:
            rows += calibration_rows(calibration, result.plan)
        if searched is not None:
            rows += _auto.rows(searched, path)
        console.show(console.facts(rows))
        if evidence is not None:
            from onnxamp.commands.verify import show

            console.show("")
            show(evidence)
    if unverified is not None:
        raise unverified
    return int((evidence is not None and not evidence.passed) or (searched is not None and not searched.feasible))


def _check_use(given: set[str]) -> None:
    """Refuse options that do not go together.

    Args:
        given: Names of the parameters that stand on the command line.

    Raises:
        UsageError: One of them is without effect here.
    """
    from onnxamp.errors import UsageError

    if "data" in given and not given & {"verified", "auto"}:
        raise UsageError("--data is for --auto and --verify: add one of them, or write --calibrate DATA.")
    if "headroom" in given and "calibrate" not in given:
        raise UsageError("--headroom is for --calibrate: add --calibrate DATA.")
    if "auto" not in given:
        if "tolerance" in given:
            raise UsageError("--tolerance is for --auto: add --auto, or use `onnxamp verify --tolerance`.")
        for name in ("metric", "max_evals"):
            if name in given:
                raise UsageError(f"--{name.replace('_', '-')} is for --auto: add --auto.")
    if "plan_only" in given and (idle := [name for name in ("verified", "report") if name in given]):
        without = "verify" if idle[0] == "verified" else "report"
        raise UsageError(
            f"--plan-only converts nothing, so there is nothing to {without}: leave --{without} out"
            f"{'' if without == 'verify' else ' (--json prints the decisions)'}."
        )
    if "auto" in given and given & {"calibrate", "plan_only"}:
        other = "--plan-only" if "plan_only" in given else "--calibrate"
        raise UsageError(f"--auto measures what it decides and writes a policy file itself: leave {other} out.")


def _output(model: str, output: str | None, level: str, dtype: str, plan_only: bool) -> str:
    """Where the result goes: `output`, or beside the model under a name that says how it was made."""
    import pathlib

    if output is not None:
        return output
    source = pathlib.Path(model)
    if dtype == "fp32":
        return str(source.with_name(f"{source.stem}.fp32.onnx"))
    level = {"auto": "O1", "auto-search": "auto"}.get(level, level)
    return str(source.with_name(f"{source.stem}.{level}.{dtype}" + (".policy.toml" if plan_only else ".onnx")))


def _given() -> set[str]:
    """The parameters that stand on the command line."""
    context = click.get_current_context()
    default = click.core.ParameterSource.DEFAULT
    return {name for name in context.params if context.get_parameter_source(name) is not default}


def _print_plan(path: str, result: ConvertResult, as_json: bool) -> None:
    from onnxamp import console

    if as_json:
        console.print_json({"output": path, "nodes": node_dicts(result.plan)})
    else:
        counts = ", ".join(f"{count} {kind}" for kind, count in result.summary.nodes.items())
        click.echo(f"{path}: the decision for every node ({counts}); edit it and give it back with --policy.")


def _write_report(file: str, model: str | ir.Model, path: str, found: dict[str, Any], result: ConvertResult) -> None:
    import json

    from onnxamp.commands._options import write_text

    if file.endswith(".html"):
        import pathlib

        from onnxamp.comparison import conversion_page

        text = conversion_page(model, result, pathlib.Path(path).name)
    else:
        text = json.dumps({**found, "nodes": node_dicts(result.plan)}, indent=2, ensure_ascii=False, allow_nan=False)
    write_text(file, text + "\n")


def node_dicts(plan: Plan) -> list[dict[str, Any]]:
    """The decision for every node, in JSON types."""
    return [
        {
            "node": node.name or (node.outputs[0].name if node.outputs else ""),
            "op_type": node.op_type,
            "precision": decision.precision,
            "code": decision.code,
            "evidence": decision.evidence,
            "operands": decision.operands,
        }
        for node, decision in plan.nodes.items()
    ]


def summary_dict(summary: Summary) -> dict[str, Any]:
    """The summary in JSON types."""
    import dataclasses

    fields = dataclasses.asdict(summary)
    fields["heavy"] = dict(zip(("low", "all"), summary.heavy, strict=True))
    for name in ("weights", "opset"):
        fields[name] = dict(zip(("before", "after"), fields[name], strict=True))
    return fields


def calibration_dict(calibration: Calibration, plan: Plan) -> dict[str, Any]:
    """What calibration saw, and the values that stay fp32 for it, in JSON types."""
    return {
        "samples": calibration.samples,
        "data": calibration.source,
        "made_up": calibration.made_up,
        "limit": calibration.limit,
        "beyond": [
            {"value": row.value, "largest": row.absmax, "batch": row.batch} for row in _raised(calibration, plan)
        ],
        "warnings": calibration.warnings(),
    }


def calibration_rows(calibration: Calibration, plan: Plan) -> list[tuple[str, str]]:
    """The same as lines of the table that ends a conversion."""
    from onnxamp.console import number

    raised = _raised(calibration, plan)
    count = f"{calibration.samples} sample" + "s" * (calibration.samples != 1)
    source = calibration.source if calibration.made_up else f"{count} from {calibration.source}"
    limit = f"{number(calibration.limit)}, the largest {calibration.dtype} number / {calibration.headroom:g}"
    stay = (
        f"{len(raised)} value{'s stay' if len(raised) != 1 else ' stays'} fp32: above"
        if raised
        else "no value is above"
    )
    rows = [("calibrated", f"{source}; {stay} {limit}")]
    rows += [("", f"{row.value} ({row.op or 'input'} {row.node!r}) reaches {number(row.absmax)}") for row in raised[:5]]
    rows += [("", f"and {len(raised) - 5} more")] if len(raised) > 5 else []
    rows += [("warning", text) for text in calibration.warnings()]
    return rows


def _raised(calibration: Calibration, plan: Plan) -> list[Observed]:
    """The values beyond the ordinary range whose writer stays fp32 for it; masks are clamped, for example."""
    from onnxamp.policy import codes

    names = {decision.evidence.get("value") for decision in plan.decisions.values() if decision.code == codes.RANGE}
    return [row for row in calibration.beyond if row.value in names]
