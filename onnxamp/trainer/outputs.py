"""How metrics have to read the outputs and labels of a bundle."""

from __future__ import annotations

from typing import Any

from onnxamp.training.bundle import Bundle


def metric_options(bundle: Bundle) -> dict[str, Any]:
    """The keyword arguments of `metrics.metric` that fit a bundle's loss and output."""
    manifest = bundle.manifest
    loss = manifest.options.get("loss", {})
    name = loss.get("name") if isinstance(loss, dict) else str(loss)
    producer = next(iter(bundle.model.graph.outputs)).producer()
    options: dict[str, Any] = {
        "binary": name == "binary_cross_entropy_with_logits",
        "probabilities": producer is not None and producer.op_type in ("Softmax", "Sigmoid"),
    }
    if manifest.labels is not None and manifest.labels.ignore_index is not None:
        options["ignore_index"] = manifest.labels.ignore_index
    return options
