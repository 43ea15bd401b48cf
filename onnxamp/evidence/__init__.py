"""Evidence: inputs, comparison of a conversion with its original, and where they begin to differ."""

from onnxamp.evidence.tolerance import Tolerance
from onnxamp.evidence.verification import VerifyResult, verify

__all__ = ["Tolerance", "VerifyResult", "verify"]
