"""Sessions: options, loading from a file, bytes or a model in memory, and running with plain arrays.

A provider that was asked for by name must be the one that the session got: ONNX Runtime itself falls back to the CPU
with no more than a line on stderr.
"""

from __future__ import annotations

import ctypes
import dataclasses
import logging
import os
import pathlib
import re
import tempfile
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import ml_dtypes
import numpy as np
import onnx

from onnxamp.errors import AmpError, DataError, ModelError, RuntimeMissingError, UnsupportedError, UsageError, one_line
from onnxamp.ort.precision import has_low
from onnxamp.ort.providers import PROVIDERS, default_options, failures, provider_list, runtime, short_name

logger = logging.getLogger("onnxamp")

# onnx-ir takes half of the worker's start, which never sees one of its models: imported where it is used.
if TYPE_CHECKING:
    import onnx_ir as ir

Model: TypeAlias = "str | os.PathLike[str] | bytes | onnx.ModelProto | ir.Model"

OPTIMIZATION = {
    "none": "ORT_DISABLE_ALL",
    "basic": "ORT_ENABLE_BASIC",
    "extended": "ORT_ENABLE_EXTENDED",
    "all": "ORT_ENABLE_ALL",
}
LOW_OPTIMIZATION = "extended"
"""The highest level that is safe for 16-bit models on the CPU."""
# A protobuf message ends at 2 GiB; above this, weights travel in a file of their own.
_INLINE_LIMIT = 1 << 30


@dataclasses.dataclass(frozen=True)
class SessionConfig:
    """How a session is made.

    Attributes:
        provider: ``auto``, a short name (``cpu``, ``cuda``, ...) or a full provider name.
        optimization: Graph optimization level: ``none``, ``basic``, ``extended``, ``all``, or ``auto``: ``all``, ONNX Runtime's
            own default, except for 16-bit models on the CPU, which get ``extended``.
        threads: Threads inside an operator; 0 leaves it to the runtime.
        memory_pattern: Plan memory ahead; off saves memory where shapes vary, and in training graphs.
        file_order: Run nodes in the order of the file, as far as optimizations leave one, and not depth first from the outputs.
        deterministic: Ask for deterministic kernels.
        log_severity: 0 verbose to 4 fatal; errors are raised, so that logging them (3) would only repeat them.
        provider_options: Options of the first provider, over `providers.default_options`.
        config: Session configuration entries, such as ``{"session.disable_prepacking": "1"}``.
        optimized_path: Where the runtime writes the optimized graph, to be read by tools.
    """

    provider: str = "auto"
    optimization: str = "auto"
    threads: int = 0
    memory_pattern: bool = True
    file_order: bool = False
    deterministic: bool = False
    log_severity: int = 4
    provider_options: Mapping[str, str] = dataclasses.field(default_factory=dict)
    config: Mapping[str, str] = dataclasses.field(default_factory=dict)
    optimized_path: str | os.PathLike[str] | None = None

    def on_cpu(self) -> SessionConfig:
        """The same on the CPU provider."""
        return dataclasses.replace(self, provider="cpu", provider_options={})


def session_options(config: SessionConfig) -> Any:
    """The `onnxruntime.SessionOptions` for `config`.

    Raises:
        UsageError: Unknown optimization level.
        RuntimeMissingError: No runtime is installed.
    """
    ort = runtime()
    if config.optimization not in (*OPTIMIZATION, "auto"):
        raise UsageError(f"Unknown optimization level {config.optimization!r}: use auto, {', '.join(OPTIMIZATION)}.")
    options = ort.SessionOptions()
    level = OPTIMIZATION["all" if config.optimization == "auto" else config.optimization]
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    options.intra_op_num_threads = config.threads
    options.enable_mem_pattern = config.memory_pattern
    if config.file_order:
        options.execution_order = ort.ExecutionOrder.PRIORITY_BASED
    options.log_severity_level = config.log_severity
    options.use_deterministic_compute = config.deterministic
    for key, value in config.config.items():
        options.add_session_config_entry(key, value)
    if config.optimized_path is not None:
        options.optimized_model_filepath = os.fspath(config.optimized_path)
    return options


def open_session(model: Model, config: SessionConfig | None = None, *, name: str | None = None) -> Any:
    """An `onnxruntime.InferenceSession` on the provider asked for.

    With ``provider="auto"`` a GPU provider that does not load leaves the CPU, and a warning is logged.

    Args:
        model: A path, serialized bytes, a `ModelProto` or an `ir.Model` (of any size).
        config: Options; defaults where None.
        name: What errors call the model, if it is no path itself.

    Raises:
        RuntimeMissingError: No runtime, or the provider asked for does not load.
        UnsupportedError: The provider has no kernel for a node, or the runtime does not know its operator.
        ModelError: The runtime refuses the model.
        MemoryError: There is not enough for it, on the host or the device.
    """
    config = config or SessionConfig()
    ort = runtime()
    names = provider_list(config.provider)
    if PROVIDERS["cuda"] in names and hasattr(ort, "preload_dlls"):
        ort.preload_dlls()  # finds the CUDA libraries that pip installed
    providers = [(names[0], {**default_options(names[0]), **config.provider_options}), *names[1:]]
    with tempfile.TemporaryDirectory(prefix="onnxamp-", ignore_cleanup_errors=True) as folder:
        source = loadable(model, folder)
        # At its default level ONNX Runtime 1.32 ends the process (a segmentation fault) on some valid 16-bit models on the CPU.
        if config.optimization == "auto" and names == [PROVIDERS["cpu"]] and has_low(source):
            config = dataclasses.replace(config, optimization=LOW_OPTIMIZATION)
        try:
            # No fallback: it would print to stdout and take the CPU instead.
            session = ort.InferenceSession(source, session_options(config), providers=providers, enable_fallback=0)
        except failures() as problem:
            raise _load_error(
                problem, name or (os.fspath(model) if isinstance(model, (str, os.PathLike)) else "the model")
            ) from problem
    got = session.get_providers()
    if got[0] != names[0]:
        message = f"{short_name(names[0])} does not load here, ONNX Runtime took {short_name(got[0])}"
        if config.provider != "auto":
            raise RuntimeMissingError(f"Provider {message}: run `onnxamp doctor`.")
        logger.warning("Provider %s; `onnxamp doctor` says why.", message)
    session.disable_fallback()
    return session


def loads(model: Model, config: SessionConfig | None = None) -> bool:
    """Whether the runtime takes the model: its operators are known and have kernels on the provider asked for."""
    try:
        open_session(model, config)
    except (ModelError, UnsupportedError):
        return False
    return True


def run(session: Any, feeds: Mapping[str, Any], outputs: Sequence[str] | None = None) -> dict[str, Any]:
    """Run `session` once with arrays, bfloat16 included (as `ml_dtypes.bfloat16` on both sides).

    Args:
        session: What `open_session` returned.
        feeds: Input name → array (or list of arrays for a sequence). Names that the model lacks are an error.
        outputs: Names of the outputs wanted; all of them where None.

    Returns:
        Output name → array, list (sequence, map) or None (empty optional).

    Raises:
        DataError: Missing or unknown names, wrong type or shape, or a node that fails on these values.
        UnsupportedError: A node has no kernel for the types that arrive.
        MemoryError: There is not enough for it, on the host or the device.
    """
    wanted = list(outputs) if outputs is not None else [value.name for value in session.get_outputs()]
    inputs = [value.name for value in session.get_inputs()]
    known = {*inputs, *(value.name for value in session.get_overridable_initializers())}
    missing = [name for name in inputs if name not in feeds]
    unknown = [name for name in feeds if name not in known]
    if missing or unknown:
        raise DataError(
            f"The data do not fit the model's inputs: missing {missing or 'none'}, unknown {unknown or 'none'}; "
            f"expected {inputs}."
        )
    kinds = {value.name: value.type for value in session.get_outputs()}
    low = any("bfloat16" in kinds.get(name, "") for name in wanted)
    if low and any(kinds[name].startswith(("seq", "optional", "map")) for name in wanted if name in kinds):
        raise UnsupportedError(
            "ONNX Runtime's Python binding hands out no sequence beside a bfloat16 tensor: ask for the outputs one by one."
        )
    values = {name: _to_ort(name, value) if low or _is_bfloat16(value) else value for name, value in feeds.items()}
    try:
        results = session.run_with_ort_values(wanted, values) if low else session.run(wanted, values)
    except failures() as problem:
        raise run_error(problem) from problem
    return dict(zip(wanted, map(to_numpy, results) if low else results, strict=True))


def loadable(model: Model, folder: str) -> str | bytes:
    """What the runtime can load: a path, or bytes that hold everything."""
    if isinstance(model, bytes):
        return model
    if isinstance(model, (str, os.PathLike)):
        if not pathlib.Path(model).is_file():
            raise ModelError(f"No such model file: {os.fspath(model)}.")
        return os.path.abspath(model)  # the worker's folder may be another
    import onnx_ir as ir

    if isinstance(model, onnx.ModelProto):
        if model.ByteSize() < _INLINE_LIMIT:
            return bytes(model.SerializeToString())
        model = ir.from_proto(model)
    tensors = [value.const_value for graph in model.graphs() for value in graph.initializers.values()]
    held = [tensor for tensor in tensors if tensor is not None]
    external = any(isinstance(tensor, ir.ExternalTensor) for tensor in held)
    if not external and sum(tensor.nbytes for tensor in held) < _INLINE_LIMIT:
        data: bytes = ir.to_proto(model).SerializeToString()
        return data
    path = os.path.join(folder, "model.onnx")
    try:
        ir.save(model, path, external_data="model.data")
    except (OSError, ValueError) as problem:
        raise ModelError(f"The weights of the model cannot be read: {_sentence(problem)}.") from problem
    return path


def _is_bfloat16(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == ml_dtypes.bfloat16


def _to_ort(name: str, value: Any) -> Any:
    wrap = runtime().OrtValue
    try:
        array = np.ascontiguousarray(value).reshape(np.shape(value))
        if array.dtype == ml_dtypes.bfloat16:  # the Python binding knows no such array, only its bits
            return wrap.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), onnx.TensorProto.BFLOAT16)
        return wrap.ortvalue_from_numpy(array)
    except failures() as problem:  # ragged lists, strings, types that ONNX lacks
        if _no_memory(problem):
            raise run_error(problem) from problem
        raise DataError(
            f"The data for the input {name!r} are no tensor that ONNX Runtime takes: {_sentence(problem)}."
        ) from problem


def to_numpy(value: Any) -> Any:
    """The array (or list, or None) that an `OrtValue` on the host holds; bfloat16 as `ml_dtypes.bfloat16`."""
    if not value.has_value():
        return None
    if value.is_tensor() and value.element_type() == onnx.TensorProto.BFLOAT16:
        shape = tuple(value.shape())
        bits = np.empty(shape, np.uint16)
        if bits.size:
            ctypes.memmove(bits.ctypes.data, value.data_ptr(), bits.nbytes)
        return bits.view(ml_dtypes.bfloat16)
    return value.numpy()


# How OpenVINO's reader of ONNX names a node that it does not take.
_REFUSED = re.compile(r"While validating ONNX node '<Node\((\w+)\): (.*?)>':?\s*([^\n]*)")
# What the allocators of ONNX Runtime's devices say where there is no memory left: an arena, CUDA and cuBLAS themselves, C++.
_NO_MEMORY = re.compile(
    r"Failed to allocate memory|Available memory of \d+ is smaller than requested|out of memory|CU\w+_STATUS_\w*ALLOC\w*_FAILED|"
    r"bad.?alloc",
    re.IGNORECASE,
)
# What ONNX Runtime says of an operator that it has no schema of.
_UNKNOWN = re.compile(r"([\w.]*):(\w+)\(-?\d+\) is not a registered function/op|No Op registered for (\w+) ")


def _no_memory(problem: Exception) -> bool:
    """Whether memory ran out, which is neither the model's nor the data's fault; the runtime has no exception of its own for it."""
    return _NO_MEMORY.search(str(problem)) is not None


def _load_error(problem: Exception, name: str) -> AmpError | MemoryError:
    """The error that says what the runtime said, by the kind of its exception."""
    kind, text = type(problem).__name__, _sentence(problem)
    if _no_memory(problem):
        return MemoryError(f"ONNX Runtime has no memory left for {name}: {text}")
    if unknown := _UNKNOWN.search(text):
        domain, op, standard = unknown.groups()
        operator = f"{domain}.{op}" if domain else op or standard
        return UnsupportedError(
            f"{name} cannot run: ONNX Runtime does not know its operator {operator}, which a library of its own would have to bring; "
            "convert works without running the model (no --verify, --calibrate or --auto), and the result is to be compared where "
            "that library is."
        )
    if refused := _REFUSED.search(str(problem)):
        operator, node, why = refused.groups()
        return UnsupportedError(
            f"OpenVINO does not take {operator} {node!r} of {name}" + (f" ({one_line(why, 120)})" if why else "") + "."
        )
    if kind == "NotImplemented":
        return UnsupportedError(
            f"ONNX Runtime has no kernel for a node of {name}: {text}; use another provider or, where it is a 16-bit one that is "
            "missing, `onnxamp emulate`."
        )
    if kind == "EPFail":
        return RuntimeMissingError(f"The execution provider failed on {name}: {text}; run `onnxamp doctor`.")
    return ModelError(f"ONNX Runtime cannot load {name} ({kind}): {text}.")


def run_error(problem: Exception) -> AmpError | MemoryError:
    """The error of a run that failed, by the kind of ONNX Runtime's exception."""
    kind, text = type(problem).__name__, _sentence(problem)
    if _no_memory(problem):
        return MemoryError(f"ONNX Runtime has no memory left while running: {text}")
    if kind == "NotImplemented":
        return UnsupportedError(f"ONNX Runtime has no kernel for a node: {text}.")
    if kind == "EPFail":
        return RuntimeMissingError(f"The execution provider failed while running: {text}.")
    return DataError(f"ONNX Runtime failed while running ({kind}): {text}.")


def _sentence(problem: Exception) -> str:
    """ONNX Runtime's message without its prefix, source lines and newlines, at most 300 characters."""
    text = one_line(problem, limit=10_000)
    text = re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", text)
    text = re.sub(r"(/\S+|[\w/.]+\.(?:cc|h)):\d+ [\w:<>~*& ]*\([^)]*\)( const)? ", "", text)
    return one_line(text)
