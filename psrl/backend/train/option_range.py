"""The one message for an option whose value is out of range."""

from psrl.core.errors import BackendError


def require(in_range: bool, key: str, value: object, wanted: str) -> None:
    """Raise unless a value is in range; the message names the option as its flag.

    Raises:
        BackendError: if it is not.
    """
    if not in_range:
        raise BackendError(f"--{key.replace('_', '-')} {value} is refused: it must be {wanted}")
