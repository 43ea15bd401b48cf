"""Options of the whole test suite."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--backend-all", action="store_true", help="Convert every backend test at every level, not one level each."
    )
