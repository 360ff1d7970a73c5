"""Exit codes, hints and suggestions."""

import pickle

import pytest

from psrl.core.errors import (
    BackendError,
    ConfigError,
    ExitCode,
    InfeasibleError,
    PlanError,
    PsrlError,
    ToleranceError,
    TraceError,
    suggest,
)


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (PsrlError, 1),
        (BackendError, 1),
        (ConfigError, 2),
        (TraceError, 2),
        (PlanError, 2),
        (InfeasibleError, 3),
        (ToleranceError, 4),
    ],
)
def test_exit_codes(kind: type[PsrlError], code: int) -> None:
    assert kind("wrong").exit_code == code
    assert issubclass(kind, PsrlError)
    assert ExitCode(code) == code


def test_text_has_the_hint_on_its_own_line() -> None:
    assert str(PlanError("3 > 2", "use 2")) == "3 > 2\n  -> use 2"
    assert str(PlanError("3 > 2")) == "3 > 2"


def test_errors_survive_pickling() -> None:
    """Worker processes send them to their parent."""
    error = pickle.loads(pickle.dumps(InfeasibleError("too big", "buy more")))
    assert (error.message, error.hint) == ("too big", "buy more")


def test_suggest() -> None:
    assert suggest("modle", ["model", "cluster"]) == " Did you mean 'model'?"
    assert suggest("zzz", ["model", "cluster"]) == ""
