"""Fixtures of methods outside the package."""

import pathlib

import pytest


@pytest.fixture
def byol(monkeypatch):
    """Overrides of the tiny config: BYOL, a method outside the package whose slow copy has batch norms."""
    monkeypatch.syspath_prepend(str(pathlib.Path(__file__).parents[1] / "fixtures"))
    return {"method__name": "byol:Byol", "method__projector": (16, 8), "method__predictor": 16}
