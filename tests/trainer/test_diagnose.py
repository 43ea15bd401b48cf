"""What `diagnose` runs is what a run would run."""

import numpy as np
import onnx
import pytest

from onnxamp.trainer.batches import bind
from onnxamp.trainer.data import Field, open_data
from onnxamp.trainer.diagnose import bad_rows, chosen_batches, diagnose_bundle
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


def test_a_row_with_nan_and_infinities_is_taken_once():
    x = np.arange(12, dtype=np.float32).reshape(6, 2)
    x[4] = np.nan, np.inf
    binding = bind(open_data({"x": x}), [Field("x", np.dtype(np.float32), ("batch", 2))])
    bad = [row for found in bad_rows(binding) for row in found.rows]
    assert bad == [4, 4]  # named with both
    (batch,) = chosen_batches(binding, 4, 3, bad)
    np.testing.assert_array_equal(batch["x"], x[[4, 0, 1]])
