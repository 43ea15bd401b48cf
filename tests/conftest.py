"""Options of the whole test suite."""

import warnings

import pytest
from onnx.backend.test.case.test_case import TestCase


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--backend-all",
        action="store_true",
        help="Convert every backend test at every level, not one level each, and differentiate every one, not one of each operator.",
    )
    parser.addoption(
        "--exported-all", action="store_true", help="Differentiate every exported model by both exporters, not a part."
    )


@pytest.fixture(scope="session")
def node_tests() -> list[TestCase]:
    """The node tests of onnx; collecting them computes them all, which takes seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from onnx.backend.test.case.node import collect_testcases

        found: list[TestCase] = collect_testcases(None)
    return found
