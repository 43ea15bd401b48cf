"""What `diagnose` runs is what a run would run."""

import numpy as np
import onnx
import pytest

from onnxamp.trainer.diagnose import diagnose_bundle
from onnxamp.training import SGD, build


@pytest.mark.parametrize("tokens", [1, 64])
def test_a_run_that_has_not_begun_has_the_divisor_of_its_weights(tokens):
    """Each row has `tokens` labels: not the rows count, but what the loss divides by."""
    rng = np.random.default_rng(0)
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 18]>
        g (float[batch, {tokens}, 4] x) => (float[batch, {tokens}, 3] y) {{ y = MatMul(x, w) }}""")
    model.graph.initializer.append(onnx.numpy_helper.from_array(rng.normal(size=(4, 3)).astype(np.float32), "w"))
    bundle = build(model, loss={"name": "cross_entropy", "axis": 2}, optimizer=SGD(), level="O0", loss_scale=1.0)
    batch = {
        "x": rng.normal(size=(4, tokens, 4)).astype(np.float32),
        "labels": rng.integers(0, 3, (4, tokens)),
        "weights": np.ones(4, np.float32),
    }
    fresh = diagnose_bundle(bundle, bundle.state, [batch])
    begun = diagnose_bundle(bundle, {**bundle.state, "scalars/seed_divisor": np.float32(4 * tokens)}, [batch])
    backward = [value for value in fresh.values if value.backward]
    assert backward
    assert fresh.values == begun.values
