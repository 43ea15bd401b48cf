"""`onnxamp convert`: an FP32 model to mixed precision."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    import onnx_ir as ir

    from onnxamp.evidence.calibration import Calibration


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
    "--dim",
    multiple=True,
    metavar="NAME=N",
    help="Size of a free dimension, for the traffic model and for inputs that --verify, --calibrate and --auto make up.",
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
    from onnxamp.commands import _auto, _converted, _widen
    from onnxamp.commands._auto_asked import asked
    from onnxamp.commands._options import check_outputs, input_sizes, measured_sizes, sizes
    from onnxamp.commands._verified import compare
    from onnxamp.conversion import convert
    from onnxamp.evidence.opening import crash_on_cpu

    dims, given = sizes(dim), _given()
    if to is not None:
        _widen.check(to, given, choices["io"])
        choices["dtype"] = to
    path = _output(model, output, "auto-search" if auto else choices["level"], choices["dtype"], plan_only)
    _check_use(given)
    if verified and data is None:
        _check_inputs(model)
    if to == "fp32":
        check_outputs([path], [], force, [model, data])
        return _widen.run(model, path, choices["io"], verified, data, dims, force, as_json)
    written = [path, *(_auto.beside(path)[:2] if auto else ())]
    check_outputs(written, report, force, [model, data, calibrate, choices["policy"]])

    source: str | ir.Model = model
    warning = ""
    if to is not None:
        source, choices["io"], warning = _widen.source(model, to, choices["io"])
    choices["io"] = choices["io"] or "keep"
    made_up = input_sizes(source, dims) if calibrate is not None or auto or verified else {}
    seen = next((given for given in (data, calibrate) if given not in (None, "made-up")), None)
    if seen is not None:
        dims = {**measured_sizes(source, seen), **dims}
    if headroom is not None:
        choices["headroom"] = headroom
    calibration = searched = None
    if calibrate is not None:
        calibration = _calibrated(model, source, calibrate, choices, made_up)
        choices["ranges"] = calibration.ranges
    if auto:
        options = _auto.options(choices, dims)
        searched = _auto.run(model, path, options, asked(tolerance, metric), data, max_evals, made_up)
        result = searched.result
    else:
        with console.progress(f"converting {model}"):
            result = convert(source, dim=dims, **choices)
    if plan_only:
        _converted.write_plan(path, result, as_json)
        return 0

    result.save(path, overwrite=force)
    evidence = compare(source, path, data, made_up) if verified else None
    crash = "" if verified else crash_on_cpu(result.model, path)
    warnings = tuple(text for text in (warning, crash) if text)
    done = _converted.Converted(model, source, path, result, calibration, searched, evidence, warnings)
    for file in report:
        done.write_report(file)
    done.show(as_json)
    return int(done.failed())


def _check_inputs(model: str) -> None:
    """Refuse, before the work and not behind it, a model whose inputs nobody can make up."""
    from onnxamp.evidence.synthesis import refuse
    from onnxamp.model.io import load

    refuse(load(model))


def _calibrated(
    model: str, source: str | ir.Model, data: str, choices: dict[str, Any], dim: dict[str, int]
) -> Calibration:
    """The ranges that values of `source` reach on `data`, or on inputs with the sizes `dim` if it is ``made-up``."""
    from onnxamp import console
    from onnxamp.evidence.calibration import calibrate
    from onnxamp.policy.options import HEADROOM

    with console.progress(f"calibrating {model}"):
        return calibrate(
            source,
            None if data == "made-up" else data,
            dtype=choices["dtype"],
            headroom=choices.get("headroom", HEADROOM),
            dim=dim,
        )


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
