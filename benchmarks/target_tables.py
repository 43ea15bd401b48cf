"""Write `onnxamp/policy/targets/NAME.json` from a list of an ONNX Runtime provider's kernels.

The list has, per domain and operator, rows `{"since": int, "until": int or null, "types": {type parameter: [type, ...]}}`, as the
provider's kernel registry holds them. What no precision decision can need is left out: operators without a float kernel, and
sequences, optionals, strings and 8-bit floats.

    python benchmarks/target_tables.py KERNELS.json ort-cuda "onnxruntime-gpu 1.31.1, CUDAExecutionProvider"
"""

import json
import pathlib
import sys

FOLDER = pathlib.Path(__file__).parents[1] / "onnxamp" / "policy" / "targets"
FLOATS = {"float", "float16", "bfloat16"}
KEPT = {*FLOATS, "double", "bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (4, 8, 16, 32, 64))}


def row(kernel):
    types = {name: [kind for kind in kinds if kind in KEPT] for name, kinds in kernel["types"].items()}
    return [kernel["since"], kernel["until"], types]


def main(source, name, runtime):
    kernels = json.loads(pathlib.Path(source).read_text())
    operators = []
    for domain, label in (("ai.onnx", ""), ("com.microsoft", "com.microsoft::")):
        for op, found in sorted(kernels.get(domain, {}).items()):
            rows = [row(kernel) for kernel in found]
            if any(not types or any(FLOATS & set(kinds) for kinds in types.values()) for _, _, types in rows):
                operators.append((label + op, rows))
    body = ",\n".join(f"  {json.dumps(op)}: {json.dumps(rows, separators=(',', ':'))}" for op, rows in operators)
    text = f'{{\n "runtime": {json.dumps(runtime)},\n "tested": true,\n "kernels": {{\n{body}\n }}\n}}\n'
    (FOLDER / f"{name}.json").write_text(text)
    print(f"{name}: {len(operators)} operators")


if __name__ == "__main__":
    main(*sys.argv[1:])
