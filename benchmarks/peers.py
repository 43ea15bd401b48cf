"""Convert models to fp16 with the other tools, for comparison; runs in an environment of its own without onnxamp.

pip install onnxconverter-common onnxruntime onnx sympy        # another environment for nvidia-modelopt[onnx]
python benchmarks/peers.py FOLDER OUT                 # writes OUT/<model>.<tool>.onnx, interfaces kept fp32
python benchmarks/peers.py --tool TOOL MODEL OUT      # one model, external data too
"""

import argparse
import os
import pathlib
import sys
import time
import warnings

sys.path.pop(0)  # this folder has modules called like some of theirs
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import onnx


def common(path: str) -> onnx.ModelProto:
    """onnxconverter-common's float16 with its defaults."""
    from onnxconverter_common import float16

    if external(path):
        return float16.convert_float_to_float16_model_path(path, keep_io_types=True)
    return float16.convert_float_to_float16(onnx.load(path), keep_io_types=True)


def runtime(path: str) -> onnx.ModelProto:
    """ONNX Runtime's transformers tool with its defaults."""
    if external(path):  # the class below would need thrice the memory
        from onnxruntime.transformers import float16

        return float16.convert_float_to_float16(path, keep_io_types=True)
    from onnxruntime.transformers.onnx_model import OnnxModel

    wrapped = OnnxModel(onnx.load(path))
    wrapped.convert_float_to_float16(keep_io_types=True)
    wrapped.topological_sort()
    return wrapped.model


def autocast(path: str) -> onnx.ModelProto:
    """ModelOpt's AutoCast with its defaults, random inputs included."""
    from modelopt.onnx.autocast import convert_to_mixed_precision

    return convert_to_mixed_precision(path, keep_io_types=True)


TOOLS = {"onnxconverter-common": common, "onnxruntime": runtime, "autocast": autocast}


def external(path: str) -> bool:
    """Whether a model has external data."""
    return any(tensor.external_data for tensor in onnx.load(path, load_external_data=False).graph.initializer)


def save(model: onnx.ModelProto, path: str) -> None:
    """Write a model, with external data where one message cannot hold it."""
    if sum(len(tensor.raw_data) for tensor in model.graph.initializer) < 1 << 30:
        onnx.save(model, path)
    else:
        data = pathlib.Path(path).name + ".data"
        onnx.save(model, path, save_as_external_data=True, location=data, size_threshold=1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--tool", choices=TOOLS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.tool:
        save(TOOLS[options.tool](str(options.source)), str(options.out))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    for path in sorted(options.source.glob("*.onnx")):
        for tool in ("onnxconverter-common", "onnxruntime"):
            started = time.perf_counter()
            try:
                save(TOOLS[tool](str(path)), str(options.out / f"{path.stem}.{tool}.onnx"))
                print(f"{path.stem:48s} {tool:22s} {time.perf_counter() - started:.2f} s", flush=True)
            except Exception as problem:
                print(
                    f"{path.stem:48s} {tool:22s} {type(problem).__name__}: {' '.join(str(problem).split())[:80]}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
