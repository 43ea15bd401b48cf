"""Convert a folder of models to fp16 with the other tools, for comparison; runs in an environment of its own without onnxamp.

pip install onnxconverter-common onnxruntime onnx sympy
python benchmarks/peers.py FOLDER OUT            # writes OUT/<model>.<tool>.onnx, interfaces kept fp32
"""

import argparse
import os
import pathlib
import time
import warnings

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import onnx


def common(model: onnx.ModelProto) -> onnx.ModelProto:
    """onnxconverter-common's float16 with its defaults."""
    from onnxconverter_common import float16

    return float16.convert_float_to_float16(model, keep_io_types=True)


def runtime(model: onnx.ModelProto) -> onnx.ModelProto:
    """ONNX Runtime's transformers tool with its defaults."""
    from onnxruntime.transformers.onnx_model import OnnxModel

    wrapped = OnnxModel(model)
    wrapped.convert_float_to_float16(keep_io_types=True)
    wrapped.topological_sort()
    return wrapped.model


TOOLS = {"onnxconverter-common": common, "onnxruntime": runtime}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    warnings.simplefilter("ignore")
    for path in sorted(options.folder.glob("*.onnx")):
        for tool, convert in TOOLS.items():
            started = time.perf_counter()
            try:
                onnx.save(convert(onnx.load(path)), options.out / f"{path.stem}.{tool}.onnx")
                print(f"{path.stem:48s} {tool:22s} {time.perf_counter() - started:.2f} s", flush=True)
            except Exception as problem:
                print(
                    f"{path.stem:48s} {tool:22s} {type(problem).__name__}: {' '.join(str(problem).split())[:80]}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
