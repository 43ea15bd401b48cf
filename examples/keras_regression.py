"""A regressor that Keras exported goes on training, from Python: R² on the rows that neither has seen."""

from pathlib import Path

import numpy as np
from sklearn.datasets import load_diabetes

import onnxamp
from onnxamp.training import AdamW, build

x, y = load_diabetes(return_X_y=True)
x, y = (x / x.std(0)).astype(np.float32), ((y - y.mean()) / y.std()).astype(np.float32)[:, None]
order = np.random.default_rng(0).permutation(len(x))  # as in export_keras.py
train, test = ({"features": x[rows], "labels": y[rows]} for rows in (order[:330], order[330:]))

model = Path(__file__).with_name("keras_regressor.onnx")
trainer = onnxamp.Trainer(
    build(model, loss="mse", optimizer=AdamW(lr=3e-3, weight_decay=0.1), level="O2", dtype="bf16")
)
print("before:", trainer.evaluate(test))
history = trainer.fit(train, epochs=15, batch_size=32, val=test, metrics=["r2", "mae"])
print("after: ", dict(history.values))
trainer.export("keras_regressor.trained.onnx", overwrite=True)
assert history.values["r2"] > 0.3
