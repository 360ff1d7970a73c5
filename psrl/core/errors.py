"""Errors that a user can cause: what is wrong, with the numbers, and what to do next."""

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of the `psrl` command."""

    OK = 0
    FAILED = 1
    BAD_INPUT = 2
    INFEASIBLE = 3
    OUTSIDE_TOLERANCE = 4


class PsrlError(Exception):
    """Base of all errors that psRL reports without a traceback.

    Args:
        message: what is wrong, with the numbers.
        hint: what the user can do next.
    """

    exit_code = ExitCode.FAILED

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  -> {self.hint}" if self.hint else self.message


class ConfigError(PsrlError, ValueError):
    """A configuration file, flag or specification is wrong."""

    exit_code = ExitCode.BAD_INPUT


class TraceError(PsrlError, ValueError):
    """A trace or a recorded rollout file is malformed."""

    exit_code = ExitCode.BAD_INPUT


class PlanError(PsrlError, ValueError):
    """A plan breaks a rule of `check_plan`, or belongs to another trace or schema."""

    exit_code = ExitCode.BAD_INPUT


class InfeasibleError(PsrlError):
    """No plan satisfies the budgets; the message carries the numbers."""

    exit_code = ExitCode.INFEASIBLE


class ToleranceError(PsrlError):
    """Two results that must agree differ by more than the tolerance."""

    exit_code = ExitCode.OUTSIDE_TOLERANCE


class BackendError(PsrlError):
    """Execution failed or a feature is refused because its sharing is not proven."""


def suggest(word: str, known: list[str]) -> str:
    """` Did you mean 'x'?` for the closest known word, else an empty string."""
    from difflib import get_close_matches

    close = get_close_matches(word, known, n=1, cutoff=0.5)
    return f" Did you mean '{close[0]}'?" if close else ""
