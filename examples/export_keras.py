"""Writes keras_regressor.onnx: a Keras regressor of the diabetes data of scikit-learn, exported by Keras itself after three epochs.

python -m venv keras && keras/bin/pip install keras torch onnx onnxscript scikit-learn && keras/bin/python examples/export_keras.py
"""

import os
import pathlib

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np
from sklearn.datasets import load_diabetes

keras.utils.set_random_seed(0)
x, y = load_diabetes(return_X_y=True)
x, y = (x / x.std(0)).astype(np.float32), ((y - y.mean()) / y.std()).astype(np.float32)[:, None]
train = np.random.default_rng(0).permutation(len(x))[:330]  # the example holds out the rest

model = keras.Sequential(
    [keras.Input((10,), name="features"), keras.layers.Dense(32, activation="relu"), keras.layers.Dense(1)]
)
model.compile("adam", "mse")
model.fit(x[train], y[train], epochs=3, batch_size=32, verbose=0)
model.export(pathlib.Path(__file__).with_name("keras_regressor.onnx"), format="onnx", verbose=False)
