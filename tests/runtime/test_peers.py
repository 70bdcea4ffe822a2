"""Processes on a machine that does not find itself by its own name."""

import socket

import pytest

from jepa_jax.base.errors import UserError
from jepa_jax.runtime.peers import connect


def test_a_name_that_does_not_resolve_is_named_before_anything_waits(monkeypatch):
    def unknown(name):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "gethostname", lambda: "my-laptop")
    monkeypatch.setattr(socket, "gethostbyname", unknown)
    places = {"JAX_COORDINATOR_ADDRESS": "10.1.2.3:23456", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
    with pytest.raises(UserError, match=r"my-laptop: .* add a line 'ADDRESS my-laptop' to its /etc/hosts"):
        connect(places | {"JAX_PLATFORMS": "cpu"})
