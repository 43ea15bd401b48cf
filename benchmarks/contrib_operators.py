"""Write `onnxamp/model/contrib_operators.json`: the signatures of ONNX Runtime's own operators.

Read from the installed runtime, so that the package itself needs none. An operand is
`[name, type variable, variadic, homogeneous]`.

    python benchmarks/contrib_operators.py
"""

import json
import os
import pathlib

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import onnx.defs
import onnxruntime
import onnxruntime.capi.onnxruntime_pybind11_state as native

TARGET = pathlib.Path(__file__).parents[1] / "onnxamp" / "model" / "contrib_operators.json"


def operand(formal):
    variadic = formal.option == native.schemadef.OpSchema.FormalParameterOption.Variadic
    return [formal.name, formal.typeStr, variadic, formal.isHomogeneous]


def main():
    # Versions too: ONNX Runtime's optimizer writes LayerNormalization at opsets before 17, which brought it to ONNX.
    known = {
        (schema.name, schema.since_version)
        for schema in onnx.defs.get_all_schemas_with_history()
        if schema.domain == ""
    }
    table = {}
    for schema in native.get_all_operator_schema():
        if schema.domain == "com.microsoft" or (
            schema.domain == "" and (schema.name, schema.since_version) not in known
        ):
            table.setdefault(schema.domain, {}).setdefault(schema.name, []).append(
                {
                    "since": schema.since_version,
                    "inputs": [operand(formal) for formal in schema.inputs],
                    "outputs": [operand(formal) for formal in schema.outputs],
                    "types": {t.type_param_str: sorted(t.allowed_type_strs) for t in schema.type_constraints},
                }
            )
    body = ",\n".join(
        " "
        + json.dumps(domain)
        + ": {\n"
        + ",\n".join(
            f"  {json.dumps(n)}: {json.dumps(sorted(v, key=lambda x: x['since']))}"
            for n, v in sorted(table[domain].items())
        )
        + "\n }"
        for domain in sorted(table)
    )
    TARGET.write_text(f'{{\n "source": "onnxruntime {onnxruntime.__version__}",\n{body}\n}}\n')
    print(f"{sum(len(ops) for ops in table.values())} operators from onnxruntime {onnxruntime.__version__}")


if __name__ == "__main__":
    main()
