"""Warnings of several policies as one list."""

from collections.abc import Mapping, Sequence


def merge_warnings(of_policy: Mapping[str, Sequence[str]]) -> list[str]:
    """Each text once, with the policies that it concerns in front unless it concerns all."""
    texts: dict[str, list[str]] = {}
    for policy, warnings in of_policy.items():
        for text in warnings:
            texts.setdefault(text, []).append(policy)
    return [
        text if len(policies) == len(of_policy) else f"{', '.join(policies)}: {text}"
        for text, policies in texts.items()
    ]
