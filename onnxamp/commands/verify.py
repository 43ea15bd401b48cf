"""`onnxamp verify`: does a conversion still compute what its original does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Sequence

    from onnxamp.evidence import VerifyResult
    from onnxamp.evidence.metrics import Difference
    from onnxamp.report import Section


@click.command(
    epilog="""Example:

\b
    onnxamp verify model.onnx model.O2.fp16.onnx
    onnxamp verify model.onnx model.O2.fp16.onnx --data samples.npz --tolerance cosine=0.9999 --tolerance snr=40
    onnxamp verify model.onnx model.O1.fp16.onnx model.O2.fp16.onnx other-tool.onnx --report compared.html"""
)
@click.argument("reference", type=click.Path())
@click.argument("candidates", type=click.Path(), nargs=-1, required=True, metavar="CANDIDATE...")
@click.option(
    "--data", type=click.Path(), help="An .npz file, or a folder of .npz or .npy files. Made up from the model else."
)
@click.option("--tolerance", multiple=True, metavar="MEASURE=NUMBER",
              help="cosine, snr, max_abs, max_rel, nonfinite, integers, top1 or kl; 'none' lifts a bound.")  # fmt: skip
@click.option("--dim", multiple=True, metavar="NAME=N", help="Size of a free dimension of inputs that are made up.")
@click.option("--samples", default=4, show_default=True, type=click.IntRange(1), help="How many inputs to make up.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Seed of inputs that are made up.")
@click.option("--provider", default="cpu", show_default=True, help="Where to run: auto, cpu, cuda, ...")
@click.option(
    "--report",
    multiple=True,
    type=click.Path(dir_okay=False),
    metavar="FILE.json|FILE.html",
    help="Write the result, as JSON or as a page.",
)
@click.option("--force", is_flag=True, help="Overwrite reports that exist.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    reference: str,
    candidates: tuple[str, ...],
    data: str | None,
    tolerance: tuple[str, ...],
    dim: tuple[str, ...],
    samples: int,
    seed: int,
    provider: str,
    report: tuple[str, ...],
    force: bool,
    as_json: bool,
) -> int:
    """Run REFERENCE and each CANDIDATE on the same inputs and compare every output.

    Several candidates (levels, types, other tools' files) end in one table. 16-bit arithmetic is emulated strictly: each
    result is rounded to its type, so that overflow shows on any machine. Exit code 1 if an output of some candidate is
    outside the tolerance (default fp16: cosine 0.999, 30 dB; bf16: cosine 0.99; no new NaN or Inf).
    """
    import json

    from onnxamp import console
    from onnxamp.commands._options import check_outputs, sizes, write_text
    from onnxamp.evidence.tolerance import parse
    from onnxamp.evidence.verification import verify

    bounds, dims = parse(tolerance), sizes(dim)
    check_outputs([], report, force, [reference, *candidates, data])
    results = []
    for candidate in candidates:
        with console.progress(f"verifying {candidate}"):
            results.append(
                verify(reference, candidate, data, bounds, dim=dims, count=samples, seed=seed, provider=provider)
            )
    parts = [{"candidate": name, **result.to_dict()} for name, result in zip(candidates, results, strict=True)]
    found = {"reference": reference, **(parts[0] if len(parts) == 1 else {"candidates": parts})}
    for file in report:
        if file.endswith(".html"):
            text = page_of(reference, candidates, results)
        else:
            text = json.dumps(found, indent=2, allow_nan=False) + "\n"
        write_text(file, text)
    if as_json:
        console.print_json(found)
    elif len(results) == 1:
        show(results[0])
    else:
        show_all(candidates, results)
    return int(not all(result.passed for result in results))


_ALL_COLUMNS = (
    "candidate",
    "verdict",
    "precision",
    "cosine",
    "SNR dB",
    "max rel",
    "non-finite",
    "unequal",
    "top-1",
    "sample",
)


def show_all(candidates: Sequence[str], results: Sequence[VerifyResult]) -> None:
    """Print a row for each candidate, and where those that fail begin to differ."""
    from onnxamp import console

    rows = [
        [_text(name, cell) for name, cell in zip(_ALL_COLUMNS, row, strict=True)]
        for row in _summaries(candidates, results)
    ]
    console.show(console.grid(list(_ALL_COLUMNS), rows, right=range(3, len(_ALL_COLUMNS))))
    if notes := dict.fromkeys(text for result in results for text in result.notes):
        console.show("", *notes)
    for name, result in zip(candidates, results, strict=True):
        if not result.passed:
            console.show("")
            console.show(f"{name}: {result.verdict()}")
            for output in result.outputs:
                if output.missed:
                    console.show(f"output {output.name!r}, sample {output.sample}: {'; '.join(output.missed)}")
            for text in result.problems:
                console.show(text)
            if result.divergence is not None:
                console.show(_where(result))


def _summaries(candidates: Sequence[str], results: Sequence[VerifyResult]) -> list[list[float | str | int | None]]:
    """One row a candidate: its worst output in each measure, and the sample of the output that is worst."""
    import math

    from onnxamp.evidence.metrics import worst_of

    rows: list[list[float | str | int | None]] = []
    for name, result in zip(candidates, results, strict=True):
        verdict = "passed" if result.passed else "failed"
        if not result.outputs:
            rows.append([name, verdict, result.precision, *[None] * 7])
            continue
        worst = worst_of(output.worst for output in result.outputs)
        lowest = min(result.outputs, key=lambda each: (not each.missed, not math.isnan(each.worst.snr), each.worst.snr))
        cosine, snr, _, relative = _cells(worst)
        unequal = worst.mismatches - worst.ties
        rows.append(
            [
                name,
                verdict,
                result.precision,
                cosine,
                snr,
                relative,
                worst.nonfinite,
                unequal,
                worst.top1,
                lowest.sample,
            ]
        )
    return rows


def show(result: VerifyResult) -> None:
    """Print the verdict, a row for each output, and where a failure begins."""
    from onnxamp import console

    rows = []
    for output in result.outputs:
        worst = output.worst
        measures = [
            _text("cosine", worst.cosine),
            f"{worst.snr:.1f}",
            console.number(worst.max_abs),
            console.number(worst.max_rel),
            str(worst.nonfinite),
        ]
        ties = f" ({worst.ties} ties)" if worst.ties else ""
        rows.append(
            (
                output.name,
                "; ".join(output.missed) or "ok",
                *([""] * len(measures) if worst.discrete else measures),
                f"{worst.mismatches} of {worst.elements}{ties}" if worst.discrete or worst.mismatches else "",
                "" if worst.top1 is None else f"{100 * worst.top1:.4g}%",
            )
        )
    columns = ("output", "verdict", "cosine", "SNR dB", "max abs", "max rel", "non-finite", "unequal", "top-1")
    used = [index for index in range(len(columns)) if index < 7 or any(row[index] for row in rows)]
    if rows:
        table = [[row[index] for index in used] for row in rows]
        console.show(console.grid([columns[index] for index in used], table, right=range(2, len(used))))
        console.show("")
    for text in (*result.problems, *result.notes):
        console.show(text)
    if result.divergence is not None:
        console.show(_where(result))
    console.show(result.verdict())


def page_of(reference: str, candidates: Sequence[str], results: Sequence[VerifyResult]) -> str:
    """The results as an HTML page."""
    import pathlib

    from onnxamp.report import Table, page

    if len(results) == 1:
        title = f"{pathlib.Path(candidates[0]).name} against {pathlib.Path(reference).name}"
        return page(title, _sections(results[0]), subtitle="onnxamp verify")
    note = "The worst output of the worst sample in each measure."
    bad = [index for index, result in enumerate(results) if not result.passed]
    sections: list[Section] = [Table("Candidates", _ALL_COLUMNS, _summaries(candidates, results), note=note, bad=bad)]
    for name, result in zip(candidates, results, strict=True):
        sections += _sections(result, f"{pathlib.Path(name).name}: ")
    title = f"{len(results)} candidates against {pathlib.Path(reference).name}"
    return page(title, sections, subtitle="onnxamp verify")


def _sections(result: VerifyResult, prefix: str = "") -> list[Section]:
    """What a page says of one candidate."""
    from onnxamp.report import Figures, Note, Table

    rows = [
        [
            output.name,
            "; ".join(output.missed) or "ok",
            *_cells(output.worst),
            output.worst.nonfinite,
            output.worst.mismatches - output.worst.ties,
            output.worst.ties,
            output.worst.top1,
            output.sample,
        ]
        for output in result.outputs
    ]
    columns = [
        "output",
        "verdict",
        "cosine",
        "SNR dB",
        "max abs",
        "max rel",
        "non-finite",
        "unequal",
        "ties",
        "top-1",
        "sample",
    ]
    bounds = [[name, value] for name, value in result.tolerance.to_dict().items() if value is not None]
    prose = [result.verdict(), *([_where(result)] if result.divergence else []), *result.problems, *result.notes]
    failed = sum(bool(output.missed) for output in result.outputs)
    return [
        Figures(
            [
                ("verdict", "passed" if result.passed else "failed", f"{failed} of {len(rows)} outputs fail"),
                ("precision", result.precision, "emulated strictly" if result.precision != "fp32" else ""),
                (
                    "samples",
                    str(result.samples),
                    result.data if result.rows is None else f"{result.rows} rows, {result.data}",
                ),
            ],
            title=prefix.rstrip(": "),
        ),
        Note(prose, tone="good" if result.passed else "bad"),
        Table(
            f"{prefix}Outputs",
            columns,
            rows,
            note="The worst of all samples; the sample is the one that is worst.",
            bad=[index for index, output in enumerate(result.outputs) if output.missed],
        ),
        Table(f"{prefix}Tolerance", ["measure", "bound"], bounds),
    ]


def _cells(worst: Difference) -> list[float | str | None]:
    """The float measures of a row; a page's table has no infinities."""
    import math

    if worst.discrete:
        return [None] * 4
    values = (worst.cosine, worst.snr, worst.max_abs, worst.max_rel)
    return [value if math.isfinite(value) else str(value) for value in values]


def _text(column: str, cell: float | str | int | None) -> str:
    """A cell on a terminal; a cosine has as many digits as tell it from 1."""
    from onnxamp import console
    from onnxamp.evidence.tolerance import told

    if cell is None or not isinstance(cell, float):
        return "" if cell is None else str(cell)
    if column == "cosine":
        return f"{cell:.6f}" if not 0.9999995 <= cell < 1 else told(cell, 1.0)
    return console.number(cell)


def _where(result: VerifyResult) -> str:
    from onnxamp import console

    found = result.divergence
    assert found is not None
    what = "its value is not finite" if found.kind == "non-finite" else f"its value has {found.snr:.1f} dB left"
    decided = f", {found.precision} by {found.code}" if found.code else ""
    where = f"node {found.node!r} ({found.op_type}{decided}), result {found.value!r}"
    if found.kind == "lowest":
        return f"No single node spoils it; the lowest is {where}: {what}."
    return f"First at {where}: {what}; the reference reaches {console.number(found.largest)}."
