"""What a micro-batch must look like: every misfit is one sentence that names the input."""

import ml_dtypes
import numpy as np
import pytest

from onnxamp.errors import DataError
from onnxamp.trainer.batch import BatchCheck
from onnxamp.training.manifest import Labels, Port

PORTS = (
    Port("x", "float32", ("n", 3), "data"),
    Port("ids", "int64", ("n", "t"), "data"),
    Port("labels", "int64", ("n",), "labels"),
    Port("weights", "float32", ("k",), "weights"),
)
CHECK = BatchCheck(PORTS, "x", [Labels("int64", ("n",), classes=4, ignore_index=-100)])


def _batch(**changes):
    batch = {
        "x": np.ones((2, 3), np.float32),
        "ids": np.zeros((2, 5), np.int64),
        "labels": np.array([0, 3]),
    }
    batch.update(changes)
    return {name: value for name, value in batch.items() if value is not None}


def test_a_good_batch_passes_and_gets_a_weight():
    batch = CHECK(_batch(labels=np.array([-100, 3])))
    assert batch.rows == 2
    assert batch.nan is None
    np.testing.assert_array_equal(batch.feeds["weights"], np.ones(1, np.float32))


def test_inputs_that_nothing_computes_with_may_be_there():
    check = BatchCheck(PORTS, "x", spare={"u"})
    assert check(_batch(u=np.ones((5, 5)))).feeds.keys() == check(_batch()).feeds.keys()
    with pytest.raises(DataError, match="has 'v', which"):
        check(_batch(u=np.ones(2), v=np.ones(2)))


def test_strided_arrays_become_contiguous():
    x = np.arange(12, dtype=np.float32).reshape(2, 6)[:, ::2]
    fed = CHECK(_batch(x=x)).feeds["x"]
    assert fed.flags.c_contiguous
    np.testing.assert_array_equal(fed, x)


X3, IDS3, WEIGHTS = np.ones((3, 3), np.float32), np.zeros((3, 5), np.int64), np.ones(3, np.float32)
MISFITS = {
    "missing": (_batch(ids=None), "lacks 'ids'"),
    "extra": (_batch(y=np.ones(2)), "has 'y', which the model does not take"),
    "misspelled": (_batch(ids=None, id=np.zeros((2, 5))), "lacks 'ids' and has 'id'"),
    "type": (_batch(x=np.ones((2, 3))), r"'x' should be float32\[n, 3\], the batch has float64\[2, 3\]"),
    "rank": (_batch(x=np.ones(3, np.float32)), r"'x' should be float32\[n, 3\], the batch has float32\[3\]"),
    "size": (_batch(x=np.ones((2, 4), np.float32)), "dimension 1"),
    "rows": (_batch(labels=np.array([1, 2, 3])), "share the size 'n', but the batch has 2 in the first and 3"),
    "empty": (_batch(x=np.ones((0, 3), np.float32)), "'x' is empty"),
    "label above": (_batch(labels=np.array([1, 4])), r"the label 4 at \[1\], but the model has 4 classes"),
    "label below": (_batch(labels=np.array([-1, 0])), r"the label -1 at \[0\]"),
    "weights": (_batch(x=X3, ids=IDS3, labels=np.zeros(3, int), weights=WEIGHTS[:2]), "has 2 values.*3 rows"),
    "negative weight": (_batch(weights=np.array([1, -1], np.float32)), r"'weights' has the value -1 at \[1\]"),
    "infinite weight": (_batch(weights=np.array([np.inf, 1], np.float32)), r"the value inf at \[0\]"),
    "no weight": (_batch(weights=np.array([1, np.nan], np.float32)), r"the value nan at \[1\]"),
    "no dict": ([np.ones(3)], "A batch is a dict"),
}


@pytest.mark.parametrize(("batch", "words"), MISFITS.values(), ids=MISFITS)
def test_a_misfit_is_named(batch, words):
    with pytest.raises(DataError, match=words) as caught:
        CHECK(batch)
    assert "\n" not in str(caught.value)


def test_nan_and_infinity_are_found_and_named():
    x = np.ones((2, 3), np.float32)
    x[1, 2] = np.nan
    assert CHECK(_batch(x=x)).nan == "the input 'x' holds 1 NaN, the first at [1, 2]"
    assert CHECK(_batch(x=x)).infinity is None
    x[1, 2] = -np.inf
    assert CHECK(_batch(x=x)).nan is None
    assert CHECK(_batch(x=x)).infinity == "the input 'x' holds 1 Inf, the first at [1, 2]"
    large = CHECK(_batch(x=np.full((2, 3), 3e38, np.float32)))
    assert (large.nan, large.infinity) == (None, None)
    check = BatchCheck((Port("h", "bfloat16", ("n",), "data"),), "h")
    assert check({"h": np.array([1, 3e38], ml_dtypes.bfloat16)}).nan is None
    assert "1 NaN" in (check({"h": np.array([np.nan], ml_dtypes.bfloat16)}).nan or "")


def test_rows_that_hold_nan_are_named_where_the_data_are_known():
    x = np.ones((4, 3), np.float32)
    x[[1, 3], 2] = np.nan
    x[3, 0] = np.inf
    batch = CHECK(
        _batch(x=x, ids=np.zeros((4, 5), np.int64), labels=np.zeros(4, np.int64)), lambda rows: f"rows {rows} of f.npz"
    )
    assert batch.nan == "the input 'x' holds 2 NaN in rows [1, 3] of f.npz"
    assert batch.infinity == "the input 'x' holds 1 Inf in rows [3] of f.npz"
