"""Conversion of a model to mixed precision: read, plan, rewrite, and say what was done."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import gc
import os
from collections.abc import Iterable, Iterator, Mapping

import onnx
import onnx_ir as ir

from onnxamp.model import io, types
from onnxamp.model.constants import constant_bytes
from onnxamp.model.preparation import prepare
from onnxamp.model.signatures import operator_name, standard_opset
from onnxamp.model.units import all_graphs, all_values
from onnxamp.passes.annotate import AnnotatePass, converted_with, recorded_plan, refuse_other_options
from onnxamp.passes.casts import InsertCastsPass
from onnxamp.passes.constants import ConvertConstantsPass
from onnxamp.passes.retype import RetypePass
from onnxamp.passes.unfuse import UnfusePass
from onnxamp.passes.widen import WidenPass
from onnxamp.policy import codes, targets
from onnxamp.policy.file import read_policy
from onnxamp.policy.operators import Kind, operator
from onnxamp.policy.options import HEADROOM
from onnxamp.policy.plan import NodeDecision, Options, Plan
from onnxamp.policy.raising import origins, plan_at_best_opset
from onnxamp.summary import Summary, summarize

_SUMMARY = "onnxamp.summary"
_OTHER_FILE = "the file from before a runtime's optimizer fused it"


@dataclasses.dataclass(frozen=True, repr=False)
class ConvertResult:
    """A converted model.

    Attributes:
        model: The model.
        plan: The decision for every node, with code and evidence.
        summary: The numbers.
    """

    model: ir.Model
    plan: Plan
    summary: Summary

    def __repr__(self) -> str:
        options, (low, heavy) = self.plan.options, self.summary.heavy
        return f"<ConvertResult {options.level} {options.dtype}: {low} of {heavy} heavy nodes in 16 bits>"

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a user should change to get more of the conversion, a sentence each."""
        return (*self.held_by_opset, *self._without_form(), *self._costly(), *self._untested())

    def _untested(self) -> tuple[str, ...]:
        """Where nobody has run what comes out."""
        target = targets.table(self.plan.options.target)
        if target.tested:
            return ()
        return (
            f"What target {target.name} ({target.runtime}) computes is taken from the ONNX schemas less a list of known gaps, and was not "
            "tested there: compare the result with the source on that runtime.",
        )

    def _without_form(self) -> tuple[str, ...]:
        """Where most heavy nodes stay fp32 for what the target or the model does not offer."""
        heavy, options = self._heavy(), self.plan.options
        for code in (codes.NO_KERNEL, codes.UNTYPED):
            held = collections.Counter(operator_name(node) for node, chosen in heavy if chosen.code == code)
            if 2 * held.total() <= len(heavy):
                continue
            names = ", ".join(name for name, _ in held.most_common(3))
            count = f"{held.total()} of {len(heavy)} heavy nodes ({names}) stay fp32"
            if code == codes.UNTYPED:
                remedy = f"convert a file of standard operators, or {_OTHER_FILE}"
                return (f"{count} because the types of what they read are not known ({code}): {remedy}.",)
            fused = f", or {_OTHER_FILE}" if any(name.startswith("com.") for name in held) else ""
            return (
                f"{count} because {options.target} has no {options.dtype} kernel of them ({code}): use another --target{fused}.",
            )
        return ()

    def _heavy(self) -> list[tuple[ir.Node, NodeDecision]]:
        return [(node, chosen) for node, chosen in self.plan.nodes.items() if operator(node).kind is Kind.HEAVY]

    def _costly(self) -> tuple[str, ...]:
        """Where the Casts around what has to be 16-bit cost more than 16 bits save."""
        source, result = self.summary.traffic["source"], self.summary.traffic["result"]
        if result <= source or self.plan.options.level != "O2":
            return ()
        nodes = self.plan.nodes.items()
        islands = collections.Counter(operator_name(node) for node, chosen in nodes if chosen.code == codes.SENSITIVE)
        lower = "".join(
            f"--lower-op {name} if its range allows ({count} fp32 islands), " for name, count in islands.most_common(1)
        )
        other_io = "keep" if self.plan.options.io == "low" else "low"
        return (
            f"The result moves more bytes than the source in the traffic model ({result:,} and {source:,}), for the Casts around what has "
            f"to be 16-bit or fp32: use {lower}--io {other_io}, or real sizes with --dim.",
        )

    @property
    def held_by_opset(self) -> tuple[str, ...]:
        """The part of `warnings` that holds for training too: heavy nodes that the opset keeps fp32."""
        heavy = [decision for _, decision in self._heavy()]
        held = [decision for decision in heavy if decision.code == codes.OPSET]
        if 2 * len(held) <= len(heavy):
            return ()
        opset = max(opset for decision in held if isinstance(opset := decision.evidence.get("opset", 0), int))
        dtype = self.plan.options.dtype
        count = f"{len(held)} of {len(heavy)} heavy nodes stay fp32"
        for decision in held:
            if isinstance(blocker := decision.evidence.get("blocker"), dict):
                return (
                    f"{count} because their {dtype} form needs opset {decision.evidence['opset']} ({codes.OPSET}), which "
                    f"{blocker['operator']} {blocker['node']!r} blocks: {blocker['reason']}; use fp16 or another --target.",
                )
        return (
            f"{count} because the model's opset has no {dtype} form of them ({codes.OPSET}): export the model at opset {opset} "
            "or use fp16.",
        )

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write the model to `path`; see `onnxamp.model.io.save`."""
        io.save(self.model, path, overwrite=overwrite)


def convert(
    model: str | os.PathLike[str] | onnx.ModelProto | ir.Model,
    *,
    level: str = "O2",
    dtype: str = "fp16",
    io: str | Iterable[str] = "keep",
    target: str = "ort-cuda",
    keep: Iterable[str] = (),
    keep_op: Iterable[str] = (),
    lower: Iterable[str] = (),
    lower_op: Iterable[str] = (),
    dim: Mapping[str, int] | None = None,
    policy: str | os.PathLike[str] | None = None,
    ranges: Mapping[str, float] | None = None,
    headroom: float = HEADROOM,
) -> ConvertResult:
    """Rewrite a model to mixed precision. The argument is not changed; unchanged weights are shared with it.

    Args:
        model: A path, a `ModelProto` or an `ir.Model`.
        level: ``O0`` changes nothing, ``OD`` lowers heavy operators only, ``O1`` those and what follows them, ``O2`` assigns for the least
            memory traffic, ``O3`` lowers all that schemas and target allow.
        dtype: ``fp16`` or ``bf16``.
        io: ``keep``, ``low``, or ``GLOB=TYPE`` for graph inputs and outputs.
        target: Whose kernels the result must have; ``any`` asks the schemas alone.
        keep: Patterns of node names that stay fp32.
        keep_op: Operators that stay fp32.
        lower: Patterns of node names that become 16-bit where that is legal.
        lower_op: Operators that become 16-bit where that is legal.
        dim: Sizes of named dimensions for the traffic model.
        policy: A policy file (TOML).
        ranges: Largest sizes of values by name, as `onnxamp.evidence.calibrate` measured them: what leaves the 16-bit range less headroom
            stays fp32, what is well inside needs no fp32 for fear of its range.
        headroom: How far inside, as a factor.

    Raises:
        UsageError: The options contradict each other or the model, or the model was converted before with others.
        ModelError: The model is damaged.
        UnsupportedError: No valid conversion exists; the node is named.
    """
    options = Options(
        level=level,
        dtype=dtype,
        io=io if isinstance(io, str) else tuple(io),
        target=target,
        keep=_patterns(keep),
        keep_op=_patterns(keep_op),
        lower=_patterns(lower),
        lower_op=_patterns(lower_op),
        dim=tuple(sorted((dim or {}).items())),
        policy=read_policy(policy) if policy is not None else (),
        headroom=headroom,
    )
    return convert_with(model, options, ranges)


def convert_with(
    model: str | os.PathLike[str] | onnx.ModelProto | ir.Model,
    options: Options,
    ranges: Mapping[str, float] | None = None,
) -> ConvertResult:
    """`convert` with all that was asked for in one object."""
    with _collector_paused():
        return _convert(model, options, ranges, keep_shapes=False)


def mixed(model: ir.Model, options: Options) -> ConvertResult:
    """`convert` for a caller that goes on with the graph: all inferred shapes stay on the values."""
    with _collector_paused():
        return _convert(model, options, None, keep_shapes=True)


def widen(model: str | os.PathLike[str] | onnx.ModelProto | ir.Model, *, keep_io: bool = False) -> ir.Model:
    """A new model that computes in fp32 what `model` computes in 16 bits; `model` is not changed.

    Types go back, rounding of constants stays: a weight has the value that 16 bits hold, which is exact in fp32. Casts that are without
    effect then fall away. It does not matter which tool made the file. From here, `convert` leads to another level or to the other
    16-bit type, under its rules: ``convert(widen("model.fp16.onnx"), dtype="bf16")``.

    Args:
        model: A path, a `ModelProto` or an `ir.Model`.
        keep_io: Whether 16-bit inputs and outputs keep their types.

    Raises:
        ModelError: The model is damaged.
        UnsupportedError: A function cannot be inlined, an operator without a known fp32 form has 16-bit values that cannot be cast, or
            so has the interface with `keep_io`.
    """
    with _collector_paused():
        result = io.load(model)
        _restore_shapes(result, _prepare(result))
        WidenPass(keep_io)(result)
    return result


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """No collection of cycles meanwhile: the graph only grows, so each would walk over all of it, and all that is imported, for nothing.

    What was made counts as old afterwards, else the next collection of young objects would be one of all of it.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if not gc.get_freeze_count():  # what the caller has frozen stays so
                gc.freeze()
                gc.unfreeze()
            gc.enable()


def _patterns(patterns: str | Iterable[str]) -> tuple[str, ...]:
    return (patterns,) if isinstance(patterns, str) else tuple(patterns)


def _convert(
    source: str | os.PathLike[str] | onnx.ModelProto | ir.Model,
    options: Options,
    ranges: Mapping[str, float] | None,
    *,
    keep_shapes: bool,
) -> ConvertResult:
    model = io.load(source)
    opset = standard_opset(model)
    refuse_other_options(model, options, ranges)
    if options.level == "O0" or converted_with(model) is not None:
        declared = _declared(model)
        types.infer(model)
    else:
        declared = _prepare(model)
    if converted_with(model) is None:
        plan = plan_at_best_opset(model, options, ranges)
        if plan.graph.model is not model:
            model = plan.graph.model
            declared = {value: declared.get(origin) for value, origin in origins(model).items()}
        summary = _rewrite(model, plan, opset)
    else:
        plan = recorded_plan(model, options)
        summary = Summary.of(model)
    if not keep_shapes:
        _restore_shapes(model, declared)
    return ConvertResult(model, plan, summary)


def _declared(model: ir.Model) -> dict[ir.Value, ir.Shape | None]:
    return {value: value.shape for value in all_values(model.graph)}


def _prepare(model: ir.Model) -> dict[ir.Value, ir.Shape | None]:
    """Bring `model` into the form for decisions; gives the shapes that it declared."""
    declared = _declared(model)
    names = {value.name: shape for value, shape in declared.items()} if model.functions else {}
    prepare(model)
    # What replaces the result of a call has its name.
    if names:
        declared.update((v, names.get(v.name)) for v in all_values(model.graph) if v not in declared)
    return declared


def _rewrite(model: ir.Model, plan: Plan, opset: int) -> Summary:
    before = sum(map(constant_bytes, plan.graph.constants))
    for rewrite in (RetypePass, ConvertConstantsPass, UnfusePass, InsertCastsPass, AnnotatePass):
        rewrite(plan)(model)
    summary = summarize(model, plan, before, opset)
    model.metadata_props[_SUMMARY] = summary.to_json()
    return summary


def _restore_shapes(model: ir.Model, declared: dict[ir.Value, ir.Shape | None]) -> None:
    """Leave only the shapes that the source declares: a runtime infers the others, and a wrong name of a dimension would misguide it.

    Inputs and outputs of bodies must have a shape where they have a type; the ones that an inlined function brought without get their
    inferred sizes.
    """
    inner = (graph for graph in all_graphs(model.graph) if graph is not model.graph)
    borders = {value for graph in inner for value in (*graph.inputs, *graph.outputs)}
    for value in all_values(model.graph):
        producer = value.producer()
        if value in borders and declared.get(value) is None:
            if value.shape is not None:
                # A branch that is never taken may get impossible sizes.
                known = [dim if isinstance(dim, int) and dim > 0 else ir.SymbolicDim(None) for dim in value.shape]
                value.shape = ir.Shape(known)
        elif value in declared:
            value.shape = declared[value]
        elif producer is not None and "onnxamp.cast" in producer.metadata_props:
            source = producer.inputs[0]
            value.shape = source.shape if source is not None else None
        elif producer is not None and operator_name(producer) != "Constant":
            value.shape = None
