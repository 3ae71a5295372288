"""Every knob: default, environment, scoped override, and errors that name it."""

from __future__ import annotations

import threading

import pytest
import torch

from mlakit import merge_states
from mlakit.dispatch import knobs


def test_defaults_need_no_environment():
    assert knobs.check_values() is False
    assert knobs.backend() == "auto"
    assert knobs.workspace_mib() == 64


@pytest.mark.parametrize("name", knobs.REGISTRY)
def test_every_knob_is_an_attribute_with_a_meaning_and_a_default_that_parses(name):
    knob = knobs.REGISTRY[name]
    assert getattr(knobs, name) is knob
    assert knob.name == name
    assert knob.variable == f"MLAKIT_{name.upper()}"
    assert knob.meaning.endswith(".")
    assert knob.parse(str(knob.default)) == knob.default


@pytest.mark.parametrize(
    ("knob", "text", "value"),
    [
        (knobs.check_values, "1", True),
        (knobs.check_values, "True", True),
        (knobs.check_values, "on", True),
        (knobs.check_values, "0", False),
        (knobs.check_values, "FALSE", False),
        (knobs.check_values, "off", False),
        (knobs.backend, "triton", "triton"),
        (knobs.workspace_mib, "7", 7),
    ],
    ids=lambda value: getattr(value, "name", repr(value)),
)
def test_the_environment_is_read_at_every_call(monkeypatch, knob, text, value):
    monkeypatch.setenv(knob.variable, text)
    assert knob() == value
    assert type(knob()) is type(knob.default)
    monkeypatch.delenv(knob.variable)
    assert knob() == knob.default


@pytest.mark.parametrize(
    ("knob", "text", "message"),
    [
        (knobs.check_values, "yes", "MLAKIT_CHECK_VALUES must be one of 1, 0, .*, got 'yes'"),
        (knobs.check_values, "", "MLAKIT_CHECK_VALUES .*, got ''"),
        (
            knobs.backend,
            "cuda",
            "MLAKIT_BACKEND must be one of auto, blackwell, hopper, .*, got 'cuda'",
        ),
        (knobs.workspace_mib, "0", "MLAKIT_WORKSPACE_MIB must be a whole number of at least 1"),
        (knobs.workspace_mib, "-3", "MLAKIT_WORKSPACE_MIB .*, got '-3'"),
        (knobs.workspace_mib, "1.5", "MLAKIT_WORKSPACE_MIB .*, got '1.5'"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_value_that_does_not_parse_names_the_variable(monkeypatch, knob, text, message):
    monkeypatch.setenv(knob.variable, text)
    with pytest.raises(ValueError, match=message):
        knob()


def test_an_override_outranks_the_environment_and_ends(monkeypatch):
    monkeypatch.setenv("MLAKIT_WORKSPACE_MIB", "8")
    with knobs.override(workspace_mib=16, check_values=True):
        assert knobs.workspace_mib() == 16
        assert knobs.check_values() is True
        with knobs.override(workspace_mib=32):
            assert knobs.workspace_mib() == 32
            assert knobs.check_values() is True
        assert knobs.workspace_mib() == 16
    assert knobs.workspace_mib() == 8
    assert knobs.check_values() is False


def _raise_inside_an_override():
    with knobs.override(check_values=True):
        raise RuntimeError("inside")


def test_an_override_ends_with_an_exception():
    with pytest.raises(RuntimeError, match="inside"):
        _raise_inside_an_override()
    assert knobs.check_values() is False


def test_an_override_of_another_thread_is_not_seen():
    seen, overridden, done = [], threading.Event(), threading.Event()

    def hold() -> None:
        with knobs.override(backend="cpu"):
            seen.append(knobs.backend())
            overridden.set()
            done.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    assert overridden.wait(10)
    assert knobs.backend() == "auto"
    done.set()
    thread.join()
    assert seen == ["cpu"]


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"chek_values": True}, ValueError, "unknown knob 'chek_values'; choose from .*backend"),
        ({"check_values": 1}, TypeError, "knob check_values must be bool, got int"),
        ({"workspace_mib": True}, TypeError, "knob workspace_mib must be int, got bool"),
        ({"workspace_mib": 0}, ValueError, "knob workspace_mib must be a whole number.*, got 0"),
        ({"backend": "cuda"}, ValueError, "knob backend must be one of .*, got 'cuda'"),
    ],
    ids=str,
)
def test_a_wrong_override_is_refused_and_changes_nothing(values, error, message):
    with pytest.raises(error, match=message), knobs.override(**values):
        pass
    assert knobs.workspace_mib() == 64
    assert knobs.backend() == "auto"


def test_a_variable_that_has_another_name_now_is_an_error(monkeypatch):
    monkeypatch.setenv("MLAKIT_REPLAY", "0")
    message = "^MLAKIT_REPLAY must not be set: it is MLAKIT_LAUNCH_CACHE now$"
    for asked in (knobs.launch_cache, knobs.for_launch_cache):
        with pytest.raises(ValueError, match=message):
            asked()
    out, lse = torch.zeros(1, 1, 4), torch.zeros(1, 1)
    with pytest.raises(ValueError, match=message):
        merge_states([out], [lse])
