"""What `onnxamp convert` tells of a conversion: on the terminal, as JSON and in reports."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import onnx_ir as ir

    from onnxamp.commands._verified import Verified
    from onnxamp.conversion import ConvertResult
    from onnxamp.evidence.calibration import Calibration
    from onnxamp.evidence.observe import Observed
    from onnxamp.evidence.search import SearchResult
    from onnxamp.policy.plan import Plan
    from onnxamp.summary import Summary


@dataclasses.dataclass(frozen=True)
class Converted:
    """A conversion that is written, and what was measured for it and of it.

    Attributes:
        model: The model's file.
        source: What was converted: that file, or the fp32 form of a 16-bit one.
        output: The file that was written.
        result: The conversion.
        calibration: The ranges that it decided with.
        searched: The search that led to it.
        verified: How it compares with `source`.
        others: What to warn of beside the conversion's own warnings.
    """

    model: str
    source: str | ir.Model
    output: str
    result: ConvertResult
    calibration: Calibration | None = None
    searched: SearchResult | None = None
    verified: Verified | None = None
    others: tuple[str, ...] = ()

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a user should change, a sentence each."""
        return (*self.result.warnings, *self.others)

    def to_dict(self) -> dict[str, Any]:
        """All of it in JSON types."""
        from onnxamp.commands import _auto

        found = {"model": self.model, "output": self.output, **_summary_dict(self.result.summary)}
        found["warnings"] = list(self.warnings)
        if self.calibration is not None:
            found["calibration"] = _calibration_dict(self.calibration, self.result.plan)
        if self.verified is not None:
            found["verify"] = self.verified.to_dict()
        if self.searched is not None:
            found["auto"] = _auto.to_dict(self.searched, self.output)
        return found

    def write_report(self, file: str) -> None:
        """Write the page that shows the graph (.html), or every decision (.json)."""
        import json
        import pathlib

        from onnxamp.commands._options import write_text

        if file.endswith(".html"):
            from onnxamp.comparison import conversion_page

            text = conversion_page(self.source, self.result, pathlib.Path(self.output).name)
        else:
            fields = {**self.to_dict(), "nodes": _node_dicts(self.result.plan)}
            text = json.dumps(fields, indent=2, ensure_ascii=False, allow_nan=False)
        write_text(file, text + "\n")

    def show(self, as_json: bool) -> None:
        """Print JSON, or the table that ends a conversion."""
        from onnxamp import console

        if as_json:
            console.print_json(self.to_dict())
            return
        console.show(console.facts(self._rows()))
        if self.verified is not None:
            self.verified.show()

    def _rows(self) -> list[tuple[str, str]]:
        from onnxamp.commands import _auto

        rows = [("written", self.output), *self.result.summary.rows()]
        rows += [("warning", text) for text in self.warnings]
        if self.calibration is not None:
            rows += _calibration_rows(self.calibration, self.result.plan)
        if self.searched is not None:
            rows += _auto.rows(self.searched, self.output)
        return rows

    def failed(self) -> bool:
        """Whether a tolerance is missed: that of --verify, or that of --auto.

        Raises:
            AmpError: What was to be verified could not be.
        """
        differs = self.verified is not None and self.verified.failed()
        return differs or (self.searched is not None and not self.searched.feasible)


def write_plan(path: str, result: ConvertResult, as_json: bool) -> None:
    """Write the decision for every node as a policy file, and print the decisions as JSON or how many there are."""
    import click

    from onnxamp import console
    from onnxamp.commands._options import write_text
    from onnxamp.policy.file import plan_text

    write_text(path, plan_text(result.plan))
    if as_json:
        console.print_json({"output": path, "nodes": _node_dicts(result.plan)})
    else:
        counts = ", ".join(f"{count} {kind}" for kind, count in result.summary.nodes.items())
        click.echo(f"{path}: the decision for every node ({counts}); edit it and give it back with --policy.")


def _node_dicts(plan: Plan) -> list[dict[str, Any]]:
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


def _summary_dict(summary: Summary) -> dict[str, Any]:
    """The summary in JSON types."""
    fields = dataclasses.asdict(summary)
    fields["heavy"] = dict(zip(("low", "all"), summary.heavy, strict=True))
    for name in ("weights", "opset"):
        fields[name] = dict(zip(("before", "after"), fields[name], strict=True))
    return fields


def _calibration_dict(calibration: Calibration, plan: Plan) -> dict[str, Any]:
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


def _calibration_rows(calibration: Calibration, plan: Plan) -> list[tuple[str, str]]:
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
