"""`onnxamp diagnose`: where numbers stop being finite or stop fitting their type, forward and backward."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import click

from onnxamp.commands._options import BATCH_SIZE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import onnx_ir as ir

    from onnxamp.evidence.observe import Observed
    from onnxamp.trainer.data import Array, Field
    from onnxamp.trainer.diagnose import BadData, Diagnosis
    from onnxamp.training.bundle import Bundle

_COLUMNS = ("value", "node", "half", "type", "smallest", "largest", "NaN", "Inf", "overflow", "underflow")


@click.command(
    epilog="""Example:

\b
    onnxamp diagnose run --data train.npz
    onnxamp diagnose model.onnx --data samples.npz --levels O0,O2,O3
    onnxamp diagnose model.onnx --data train.npz --loss cross_entropy --report diagnosis.html"""
)
@click.argument("source", metavar="RUN|MODEL")
@click.option("--data", required=True, help=".npz file or folder of .npy or .npz; columns are named like the inputs.")
@click.option("--column", multiple=True, metavar="INPUT=NAME", help="The data call this input NAME; repeatable.")
@click.option("--loss", metavar="NAME", help="With MODEL: look at loss and backward too, as `onnxamp train` would.")
@click.option("--levels", metavar="L,L,...", help="Levels to compare.  [default: the run's; of a model O2]")
@click.option(
    "--dtype", type=click.Choice(["fp16", "bf16"]), help="The 16-bit type.  [default: the run's; of a model fp16]"
)
@click.option("--checkpoint", help="Of a run: best, last (default), or a checkpoint's file.")
@click.option(
    "--batch-size",
    type=click.IntRange(min=1),
    help=f"Most rows of a micro-batch.  [default: the run's; of a model {BATCH_SIZE}]",
)
@click.option(
    "--rows", type=click.IntRange(min=1), default=64, show_default=True, help="Rows to look at, bad ones first."
)
@click.option("--top", type=click.IntRange(min=1), default=15, show_default=True, help="Rows of the table.")
@click.option("--report", type=click.Path(dir_okay=False), help="Write a page with all values (.html).")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--force", is_flag=True, help="Overwrite the page.")
def command(
    source: str,
    data: str,
    column: tuple[str, ...],
    loss: str | None,
    levels: str | None,
    dtype: str | None,
    checkpoint: str | None,
    batch_size: int | None,
    rows: int,
    top: int,
    report: str | None,
    as_json: bool,
    force: bool,
) -> int:
    """Name the first node whose value is NaN, infinite or too large for its type, and show every node's range.

    Exit code 1 if there is such a node or such data.
    """
    from onnxamp import console
    from onnxamp.commands._options import check_outputs, write_text
    from onnxamp.trainer.diagnose import ranked

    check_outputs([report] if report else [], [], force, [source, data])
    with console.progress(f"looking at {source}"):
        bad_data, found = _look(source, data, column, loss, levels, dtype, checkpoint, batch_size, rows)
    if report:
        write_text(report, _page(source, data, bad_data, found))
    if as_json:
        shown = [{"column": bad.column, "rows": list(bad.rows), "where": bad.where, "nan": bad.nan} for bad in bad_data]
        console.print_json({"data": shown, "levels": [diagnosis.to_json() for diagnosis in found]})
    else:
        for bad in bad_data:
            click.echo(f"data  {bad}")
        for diagnosis in found:
            click.echo(diagnosis.verdict())
        for diagnosis in found:
            worst = ranked(diagnosis.values)[:top]
            if worst:
                title = f"{diagnosis.title}: {len(diagnosis.bad)} bad values of {len(diagnosis.values)}"
                table = [
                    [console.number(cell) if isinstance(cell, float) else str(cell) for cell in _row(row)[:-1]]
                    + [f"{row.underflow:.2%}" if row.underflow else ""]
                    for row in worst
                ]
                console.show("", console.grid(_COLUMNS, table, right=(4, 5, 6, 7, 8, 9), title=title))
        if report:
            click.echo(f"page  {report}")
    return 1 if bad_data or any(diagnosis.bad for diagnosis in found) else 0


def _look(
    source: str,
    data: str,
    column: tuple[str, ...],
    loss: str | None,
    levels: str | None,
    dtype: str | None,
    checkpoint: str | None,
    batch_size: int | None,
    rows: int,
) -> tuple[list[BadData], list[Diagnosis]]:
    """Bad rows of the data, and a diagnosis per level."""
    from onnxamp.commands._configured import pairs
    from onnxamp.model import io
    from onnxamp.trainer import diagnose
    from onnxamp.trainer.batches import bind
    from onnxamp.trainer.data import open_data

    subject = _subject(source, loss, checkpoint, batch_size)
    kind = dtype or subject.options["dtype"]
    wanted = _wanted(levels, subject.options["level"])
    model = subject.own.model if subject.own is not None else io.load(source)
    bundles = _bundles(subject, model, wanted, kind) if subject.trains else {}
    fields = _fields(source, bundles.values())
    binding = bind(open_data(data), fields, columns=pairs(column, "--column"), optional=("weights",))
    bad_data = diagnose.bad_rows(binding)
    bad = [row for problem in bad_data for row in problem.rows]
    batches = diagnose.chosen_batches(binding, subject.batch_size, rows, bad)
    found = []
    for level in wanted:
        bundle = bundles.get(level)
        if bundle is None:
            found.append(diagnose.diagnose_model(model, batches, level, kind))
        elif isinstance(bundle, str):
            found.append(diagnose.Diagnosis(level, kind, (), bundle))
        else:
            state = subject.state if bundle is subject.own else diagnose.with_state(bundle, subject.state)
            found.append(diagnose.diagnose_bundle(bundle, state, batches))
    return bad_data, found


@dataclasses.dataclass(frozen=True)
class _Subject:
    """A run or a model.

    Attributes:
        options: What `build` is to be called with; level and type hold where the user names none.
        batch_size: Most rows of a micro-batch.
        own: The bundle of a run.
        state: The state of a run.
    """

    options: Mapping[str, Any]
    batch_size: int
    own: Bundle | None = None
    state: Mapping[str, Array] = dataclasses.field(default_factory=dict)

    @property
    def trains(self) -> bool:
        """Whether there is a backward half to look at."""
        return self.own is not None or bool(self.options["loss"])


def _subject(source: str, loss: str | None, checkpoint: str | None, batch_size: int | None) -> _Subject:
    """What RUN|MODEL names.

    Raises:
        UsageError: An option is for the other of the two, or the run has no such checkpoint.
        ModelError: The run is broken.
    """
    from pathlib import Path

    from onnxamp.errors import UsageError
    from onnxamp.trainer.checkpoint import read
    from onnxamp.trainer.run import Run
    from onnxamp.training.bundle import Bundle

    is_run = Path(source).is_dir()
    if is_run and loss:
        raise UsageError("--loss is for a MODEL; a run has its own.")
    if not is_run and checkpoint:
        raise UsageError("--checkpoint is for a run, and this is a model.")
    if not is_run:
        options = {"loss": loss, "optimizer": "sgd", "level": "O2", "dtype": "fp16"}
        return _Subject(options, batch_size or BATCH_SIZE)
    run = Run.open(source)
    own = Bundle.load(run.bundle_path)
    newest = run.newest() if checkpoint is None else run.checkpoint(checkpoint)
    state = own.state if newest is None else read(newest)[0]
    return _Subject(own.manifest.options, batch_size or run.read_config().get("batch-size") or BATCH_SIZE, own, state)


def _wanted(levels: str | None, default: str) -> list[str]:
    """The levels to compare.

    Raises:
        UsageError: One of them is none.
    """
    from onnxamp.errors import UsageError

    wanted = levels.split(",") if levels else [default]
    for level in wanted:
        if level not in ("O0", "OD", "O1", "O2", "O3"):
            raise UsageError(f"--levels takes O0, OD, O1, O2 and O3 with commas between them, not {level!r}.")
    return wanted


def _bundles(subject: _Subject, model: ir.Model, levels: list[str], dtype: str) -> dict[str, Bundle | str]:
    """The bundle of each level, or in words why there is none; an error where no other level is asked for."""
    from onnxamp.errors import AmpError
    from onnxamp.training import build

    own = subject.own
    bundles: dict[str, Bundle | str] = {}
    for level in levels:
        if own is not None and (level, dtype) == (own.manifest.level, own.manifest.dtype):
            bundles[level] = own
            continue
        try:
            bundles[level] = build(model, **{**subject.options, "level": level, "dtype": dtype})
        except AmpError as problem:
            if len(levels) == 1:
                raise
            bundles[level] = str(problem)
    return bundles


def _fields(source: str, bundles: Iterable[Bundle | str]) -> tuple[Field, ...]:
    """The columns that are read: those of a run, or else what the model file asks for."""
    from onnxamp.trainer.batch import fields
    from onnxamp.trainer.predict import model_fields

    for bundle in bundles:
        if not isinstance(bundle, str):
            return fields(bundle.manifest)
    return model_fields(source)


def _row(row: Observed) -> list[str | int | float]:
    import math

    return [
        row.value,
        f"{row.op} {row.node}" if row.node != row.value else row.op,
        "backward" if row.backward else "forward",
        row.precision,
        row.absmin if math.isfinite(row.absmin) else "",
        row.absmax or "",
        row.nan or "",
        row.inf or "",
        row.overflow or "",
        row.underflow or "",
    ]


def _page(source: str, data: str, bad_data: list[BadData], found: list[Diagnosis]) -> str:
    """All values of all levels as a page."""
    from onnxamp.report import Note, Section, Table, page

    bad = bad_data or any(diagnosis.bad for diagnosis in found)
    lines = [f"Data: {problem}." for problem in bad_data] + [f"{diagnosis.verdict()}." for diagnosis in found]
    sections: list[Section] = [Note(lines, "Verdict", "bad" if bad else "good")]
    if len(found) > 1:
        rows: list[list[str | int | float]] = [
            [
                diagnosis.level,
                diagnosis.dtype if diagnosis.level != "O0" else "fp32",
                len(diagnosis.bad),
                diagnosis.first.value if diagnosis.first else "",
                max((value.underflow for value in diagnosis.values if value.precision != "fp32"), default=0.0),
            ]
            for diagnosis in found
        ]
        columns = ["level", "type", "bad values", "first", "worst underflow share of a 16-bit value"]
        sections.append(Table("Levels", columns, rows))
    note = (
        "In the order in which they are made. Magnitudes are those before rounding; overflow and underflow of an fp32 value "
        "say what the 16-bit type would do to it."
    )
    for diagnosis in found:
        sections.append(
            Table(f"Values at {diagnosis.title}", list(_COLUMNS), [_row(row) for row in diagnosis.values], note)
        )
    return page(f"Diagnosis of {source}", sections, subtitle=f"on {data}")
