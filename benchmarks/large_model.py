"""Write a model with 2 GB of external data: what protobuf cannot hold in one message.

python benchmarks/large_model.py FOLDER            # 30 MatMuls of 4096 x 4096: FOLDER/chain.onnx, 1.9 GiB
python benchmarks/large_model.py FOLDER --single   # one MatMul with one tensor of 2 GiB: FOLDER/single.onnx
"""

from __future__ import annotations

import argparse
import pathlib

import numpy as np
import onnx
from onnx import TensorProto, helper

SHAPES = {"chain": [(4096, 4096)] * 30, "single": [(16384, 32768)]}
_ROWS = 1024


def write(folder: pathlib.Path, name: str) -> pathlib.Path:
    """Write model `name` of `SHAPES` with its data file beside it; the model's path."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    weights, nodes, last = [], [], "x"
    with open(folder / f"{name}.data", "wb") as data:
        for index, (rows, columns) in enumerate(SHAPES[name]):
            weight = TensorProto(
                name=f"w{index}", data_type=TensorProto.FLOAT, dims=(rows, columns), data_location=TensorProto.EXTERNAL
            )
            places = {"location": f"{name}.data", "offset": data.tell(), "length": 4 * rows * columns}
            for key, place in places.items():
                weight.external_data.add(key=key, value=str(place))
            for _ in range(0, rows, _ROWS):
                block = rng.standard_normal((_ROWS, columns), np.float32) / np.float32(rows**0.5)
                data.write(block.tobytes())
            weights.append(weight)
            nodes.append(helper.make_node("MatMul", [last, weight.name], [f"y{index}"], name=f"MatMul_{index}"))
            last = f"y{index}"
    kind = helper.make_tensor_value_info
    first, end = SHAPES[name][0][0], SHAPES[name][-1][1]
    graph = helper.make_graph(
        nodes,
        name,
        [kind("x", TensorProto.FLOAT, ["batch", first])],
        [kind(last, TensorProto.FLOAT, ["batch", end])],
        weights,
    )
    path = folder / f"{name}.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--single", action="store_true")
    options = parser.parse_args()
    print(write(options.folder, "single" if options.single else "chain"))


if __name__ == "__main__":
    main()
