"""`onnxamp verify`: does a conversion still compute what its original does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from onnxamp.evidence import VerifyResult


@click.command(
    epilog="""Example:

\b
    onnxamp verify model.onnx model.O2.fp16.onnx
    onnxamp verify model.onnx model.O2.fp16.onnx --data samples.npz --tolerance cosine=0.9999 --tolerance snr=40"""
)
@click.argument("reference", type=click.Path())
@click.argument("candidate", type=click.Path())
@click.option(
    "--data", type=click.Path(), help="An .npz file, or a folder of .npz or .npy files. Made up from the model else."
)
@click.option("--tolerance", multiple=True, metavar="MEASURE=NUMBER",
              help="cosine, snr, max_abs, max_rel, nonfinite, integers or top1; 'none' lifts a bound.")  # fmt: skip
@click.option("--dim", multiple=True, metavar="NAME=N", help="Size of a free dimension of inputs that are made up.")
@click.option("--samples", default=4, show_default=True, type=click.IntRange(1), help="How many inputs to make up.")
@click.option("--seed", default=0, show_default=True, help="Seed of inputs that are made up.")
@click.option("--provider", default="cpu", show_default=True, help="Where to run: auto, cpu, cuda, ...")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    reference: str,
    candidate: str,
    data: str | None,
    tolerance: tuple[str, ...],
    dim: tuple[str, ...],
    samples: int,
    seed: int,
    provider: str,
    as_json: bool,
) -> int:
    """Run REFERENCE and CANDIDATE on the same inputs and compare every output.

    16-bit arithmetic is emulated strictly: each result is rounded to its type, so that overflow shows on any machine. Exit
    code 1 if an output is outside the tolerance (default fp16: cosine 0.999, 30 dB; bf16: cosine 0.99; no new NaN or Inf).
    """
    from onnxamp import console
    from onnxamp.commands._options import sizes
    from onnxamp.evidence.tolerance import parse
    from onnxamp.evidence.verification import verify

    bounds, dims = parse(tolerance), sizes(dim)
    with console.progress(f"verifying {candidate}"):
        result = verify(reference, candidate, data, bounds, dim=dims, count=samples, seed=seed, provider=provider)
    if as_json:
        console.print_json({"reference": reference, "candidate": candidate, **result.to_dict()})
    else:
        show(result)
    return int(not result.passed)


def show(result: VerifyResult) -> None:
    """Print the verdict, a row for each output, and where a failure begins."""
    from onnxamp import console

    rows = []
    for output in result.outputs:
        worst = output.worst
        measures = [
            f"{worst.cosine:.6f}",
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
    console.show(_verdict(result))


def _where(result: VerifyResult) -> str:
    from onnxamp import console

    found = result.divergence
    assert found is not None
    what = (
        "its value is not finite" if found.kind == "non-finite" else f"its value has {found.snr:.1f} dB left"
    ) + f"; the reference reaches {console.number(found.largest)}"
    decided = f", {found.precision} by {found.code}" if found.code else ""
    return f"First at node {found.node!r} ({found.op_type}{decided}), result {found.value!r}: {what}."


def _verdict(result: VerifyResult) -> str:
    failed = sum(bool(output.missed) for output in result.outputs)
    outcome = "PASSED" if result.passed else "FAILED"
    if failed:
        outcome += f" ({failed} of {len(result.outputs)} outputs)"
    how = f"{result.precision} emulated strictly" if result.precision != "fp32" else "fp32"
    count = f"{result.samples} sample" + ("s" if result.samples != 1 else "")
    source = result.data if "made up" in result.data else f"{count} from {result.data}"
    return f"{outcome}: {how}, {source}."
