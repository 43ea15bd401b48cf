"""How metrics have to read the outputs and labels of a bundle."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnxamp.training.bundle import Bundle


def prediction(bundle: Bundle) -> ir.Value:
    """The output that metrics compare with labels: the one that the loss reads, or the first if the model has its own loss."""
    wanted = None if bundle.manifest.labels is None else bundle.manifest.options.get("output")
    outputs = bundle.model.graph.outputs
    return next((value for value in outputs if value.name == wanted), outputs[0])


def metric_options(bundle: Bundle) -> dict[str, Any]:
    """The keyword arguments of `metrics.metric` that fit a bundle's loss and output."""
    manifest = bundle.manifest
    loss = manifest.options.get("loss", {})
    name = loss.get("name") if isinstance(loss, dict) else str(loss)
    producer = prediction(bundle).producer()
    options: dict[str, Any] = {
        "binary": name == "binary_cross_entropy_with_logits",
        "probabilities": producer is not None and producer.op_type in ("Softmax", "Sigmoid"),
    }
    if manifest.labels is not None and manifest.labels.ignore_index is not None:
        options["ignore_index"] = manifest.labels.ignore_index
    return options
