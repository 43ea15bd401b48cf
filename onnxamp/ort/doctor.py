"""What is wrong with the installed ONNX Runtime, and the command that mends it.

All distributions of ONNX Runtime own the same folder, ``onnxruntime/``; installing two leaves a mixture of both, which
imports and silently lacks providers. A provider that a build lists need not load either.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping

from onnxamp.errors import RuntimeMissingError, one_line
from onnxamp.ort import cuda
from onnxamp.ort.providers import PROVIDERS, runtime, short_name

# The distributions that own the folder, the one to keep first where several are installed.
DISTRIBUTIONS = (
    "onnxruntime-gpu",
    "onnxruntime-training",
    "onnxruntime-training-cpu",
    "onnxruntime-openvino",
    "onnxruntime-cann",
    "onnxruntime-rocm",
    "onnxruntime-migraphx",
    "onnxruntime-directml",
    "onnxruntime-qnn",
    "onnxruntime-webgpu",
    "onnxruntime",
)

# One session of one node, in a process of its own: a provider may crash, and says why only on stderr.
_PROBE = """
import json, sys
import onnxruntime as ort
if hasattr(ort, "preload_dlls") and sys.argv[1] in ("CUDAExecutionProvider", "TensorrtExecutionProvider"):
    ort.preload_dlls()
options = ort.SessionOptions()
options.log_severity_level = 2
model = bytes.fromhex(sys.argv[2])
session = ort.InferenceSession(model, options, providers=[sys.argv[1]], enable_fallback=0)
print(json.dumps(session.get_providers()))
"""


@dataclasses.dataclass(frozen=True)
class Provider:
    """A provider that the runtime was built with.

    Attributes:
        name: Short name.
        loads: Whether a session got it.
        reason: Why not.
    """

    name: str
    loads: bool
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """The state of the environment.

    Attributes:
        python: Version of Python.
        distributions: Installed distributions that own ``onnxruntime/``, with versions.
        version: Version of the runtime that imports; empty if none does.
        providers: The providers that it lists.
        findings: What is wrong, a sentence each.
        commands: What mends it, in order.
        cuda: On a build for CUDA what is there of it: ``driver``, ``gpu N``, ``CUDA`` and ``cuDNN`` (built for, and found).
    """

    python: str
    distributions: dict[str, str]
    version: str
    providers: tuple[Provider, ...]
    findings: tuple[str, ...]
    commands: tuple[str, ...]
    cuda: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def healthy(self) -> bool:
        """Whether nothing is wrong."""
        return not self.findings


def installed() -> dict[str, str]:
    """The installed distributions that own ``onnxruntime/``, with versions, those to keep first."""
    found = {}
    for distribution in importlib.metadata.distributions():
        name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"] or "").lower()
        if name in DISTRIBUTIONS or name.startswith(("ort-nightly", "ort-gpu-nightly")):
            found[name] = distribution.version
    order = {name: index for index, name in enumerate(DISTRIBUTIONS)}
    return dict(sorted(found.items(), key=lambda item: order.get(item[0], len(order))))


def diagnose() -> Diagnosis:
    """Look at the installed runtime; starts one short process for each provider."""
    distributions = installed()
    findings: list[str] = []
    commands: list[str] = []
    version, providers = "", []
    try:
        module = runtime()
        version = str(module.__version__)
        providers = [_probe(name) for name in module.get_available_providers() if name != "AzureExecutionProvider"]
    except RuntimeMissingError as problem:
        cause = str(problem).partition(": run `onnxamp doctor`")[0].rstrip(".") + "."
        gone = bool(distributions) and isinstance(problem.__cause__, ModuleNotFoundError)
        findings.append(
            "A distribution of ONNX Runtime is installed, but its folder onnxruntime/ is gone." if gone else cause
        )
    _check_distributions(distributions, version, findings, commands)
    if len(distributions) == 1:
        _check_providers(next(iter(distributions)), providers, findings, commands)
    devices = _cuda(findings) if "cuda" in {provider.name for provider in providers} else {}
    return Diagnosis(
        python=".".join(map(str, sys.version_info[:3])),
        distributions=distributions,
        version=version,
        providers=tuple(providers),
        findings=tuple(findings),
        commands=tuple(commands),
        cuda=devices,
    )


def _cuda(findings: list[str]) -> dict[str, str]:
    """Driver and devices as the driver tells them, libraries as they are installed."""
    facts: dict[str, str] = {}
    try:
        found = cuda.driver()
        facts["driver"] = f"runs CUDA up to {found.version}"
        for index, gpu in enumerate(found.gpus()):
            doubts = [text for dtype in ("fp16", "bf16") if (text := cuda.expectation(gpu.capability, dtype))]
            capability = ".".join(map(str, gpu.capability))
            size = f"{gpu.memory / 2**30:.0f} GiB"
            facts[f"gpu {index}"] = "; ".join([f"{gpu.name}, compute capability {capability}, {size}", *doubts])
        if len(facts) == 1:
            findings.append("The NVIDIA driver finds no GPU.")
    except RuntimeMissingError as problem:
        facts["driver"] = str(problem)
    built = importlib.import_module("onnxruntime.capi.build_and_package_info")
    for name, attribute, library in (("CUDA", "cuda_version", "cuda-runtime"), ("cuDNN", "cudnn_version", "cudnn")):
        version = str(getattr(built, attribute, "") or "")
        wheels = [
            f"{distribution.metadata['Name']} {distribution.version}"
            for distribution in importlib.metadata.distributions()
            if re.fullmatch(rf"nvidia-{library}(-cu\d+)?", distribution.metadata["Name"] or "")
        ]
        facts[name] = f"built for {version or 'an unknown version'}; installed by pip: {', '.join(wheels) or 'none'}"
    return facts


def _check_distributions(
    distributions: Mapping[str, str], version: str, findings: list[str], commands: list[str]
) -> None:
    pip = "python -m pip"
    if len(distributions) > 1:
        keep, kept = next(iter(distributions.items()))
        names = ", ".join(f"{name} {number}" for name, number in distributions.items())
        findings.append(
            f"{len(distributions)} distributions share the folder onnxruntime/ and overwrite each other: {names}."
        )
        commands.append(f"{pip} uninstall -y {' '.join(distributions)}")
        commands.append(f"{pip} install --no-deps '{keep}=={kept}'")
    elif not distributions:
        if version:
            findings.append(f"ONNX Runtime {version} imports but belongs to no installed distribution.")
        else:
            commands.append(f"{pip} install 'onnxamp[cpu]'")
    else:
        name, number = next(iter(distributions.items()))
        if not version:
            commands.append(f"{pip} install --force-reinstall --no-deps '{name}=={number}'")
        elif not _same_release(version, number):
            findings.append(
                f"{name} {number} is installed, but onnxruntime/ holds {version}: another one wrote over it."
            )
            commands.append(f"{pip} install --force-reinstall --no-deps '{name}=={number}'")


def _same_release(module: str, distribution: str) -> bool:
    """Whether both versions name the same release, local suffixes aside."""
    return module.partition("+")[0].split(".")[:3] == distribution.partition("+")[0].split(".")[:3]


def _check_providers(name: str, providers: Iterable[Provider], findings: list[str], commands: list[str]) -> None:
    listed = {provider.name: provider for provider in providers}
    if name == "onnxruntime-gpu" and listed:
        if "cuda" not in listed:
            findings.append("onnxruntime-gpu is installed, but the module that imports has no CUDA provider.")
            commands.append("python -m pip install --force-reinstall --no-deps onnxruntime-gpu")
        elif not listed["cuda"].loads:
            findings.append(f"The CUDA provider does not load: {listed['cuda'].reason}.")
            if re.search(r"lib(cu|nv)\w+\.so|cudnn|cublas", listed["cuda"].reason, re.IGNORECASE):
                commands.append("python -m pip install 'onnxruntime-gpu[cuda,cudnn]'")
    for provider in listed.values():
        if not provider.loads and provider.name not in ("cuda", "tensorrt"):
            findings.append(f"The provider {provider.name} does not load: {provider.reason}.")


def _probe(provider: str) -> Provider:
    """Whether a session of one node gets `provider`."""
    name = short_name(provider)
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE, provider, _tiny_model().hex()],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Provider(name, False, "no answer within 120 seconds")
    if done.returncode < 0:
        return Provider(name, False, f"its process ended with signal {-done.returncode}")
    lines = done.stdout.strip().splitlines()
    try:
        got = json.loads(lines[-1]) if lines else []
    except json.JSONDecodeError:
        got = []
    if provider in got:
        return Provider(name, True)
    return Provider(name, False, _reason(done.stderr))


def _reason(log: str) -> str:
    """The line of ONNX Runtime's log that says why a provider does not load."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", log)
    for pattern in (
        r"with error: (.+)",
        r"(CUDA failure[^;]+)",
        r"(no CUDA-capable device[^;]*)",
        r"Error: (.+)",
        r"\w+Error: (.+)",
        r"(Failed to .+)",
    ):
        if found := re.search(pattern, text):
            return one_line(found.group(1), 200)
    lines = [line for line in text.splitlines() if line.strip()]
    return one_line(lines[-1], 200) if lines else "ONNX Runtime does not say why"


def _tiny_model() -> bytes:
    from onnx import TensorProto, helper

    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "probe", values[:1], values[1:])
    model = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 15)])
    return bytes(model.SerializeToString())


Kernels = dict[tuple[str, str], list[tuple[int, int | None, dict[str, frozenset[str]]]]]


def kernels(provider: str) -> Kernels:
    """The kernels of `provider` (short name) in the installed runtime: (domain, operator) → rows of first and last version
    (None if open) and the types of each type parameter, as ``float16``.

    Raises:
        RuntimeMissingError: No runtime, or one that does not tell its kernels.
    """
    runtime()
    from onnxruntime.capi import _pybind_state as binding

    if not hasattr(binding, "get_all_opkernel_def"):
        raise RuntimeMissingError("This ONNX Runtime does not tell its kernels: use version 1.20 or newer.")
    full = PROVIDERS[provider]
    result: Kernels = {}
    for kernel in binding.get_all_opkernel_def():
        if kernel.provider != full:
            continue
        first, last = kernel.version_range
        types = {
            name: frozenset(text.removeprefix("tensor(").removesuffix(")") for text in allowed)
            for name, allowed in kernel.type_constraints.items()
        }
        result.setdefault((kernel.domain, kernel.op_name), []).append(
            (first, None if last >= 2**31 - 1 else last, types)
        )
    return result
