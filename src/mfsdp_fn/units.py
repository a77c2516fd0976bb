"""Unit patterns: which leaves are gathered together."""

from __future__ import annotations

from collections.abc import Sequence

from .errors import PlanError, bad

Path = tuple[str, ...]


def split(pattern: str) -> Path:
    """Components of a dotted pattern or path; the root, ``""``, has none."""
    return tuple(pattern.split(".")) if pattern else ()


def matches(pattern: str, path: Path) -> bool:
    """Whether every component of `path` matches the pattern's; ``*`` stands for any run of characters in one.

    >>> matches("blocks.*", ("blocks", "10")), matches("blocks.*", ("blocks", "10", "mlp"))
    (True, False)
    """
    parts = split(pattern)
    return len(parts) == len(path) and all(map(_matches_component, path, parts))


def _matches_component(text: str, pattern: str) -> bool:
    # Not fnmatch: compilers trace this (units_matching stands inside step functions) and can't trace that.
    first, *rest = pattern.split("*")
    if not rest:
        return text == pattern
    if not text.startswith(first) or len(text) < len(first) + len(rest[-1]) or not text.endswith(rest[-1]):
        return False
    text = text[len(first) : len(text) - len(rest[-1])]
    for part in rest[:-1]:
        found = text.find(part)
        if found < 0:
            return False
        text = text[found + len(part) :]
    return True


def check_patterns(argument: str, patterns: object) -> None:
    """Refuse what isn't a sequence of patterns.

    Raises:
        PlanError: naming the argument.
    """
    if isinstance(patterns, str) or not isinstance(patterns, Sequence):
        raise PlanError(bad(argument, repr(patterns), "a tuple of dotted patterns", f"write ({patterns!r},)"))
    for pattern in patterns:
        if not isinstance(pattern, str) or ("" in pattern.split(".") and pattern):
            raise PlanError(
                bad(
                    argument,
                    repr(pattern),
                    "a dotted pattern such as 'blocks.*'",
                    "give one * or name a component",
                )
            )


def assign_units(paths: Sequence[Path], patterns: Sequence[str]) -> list[str]:
    """The unit of each path: the longest prefix of it that a pattern matches, or the root ``""``.

    >>> assign_units([("emb",), ("l", "0", "w"), ("l", "1", "w")], ["l.*"])
    ['', 'l.0', 'l.1']

    Raises:
        PlanError: a pattern that matches nothing.
    """
    check_patterns("units", patterns)
    by_length = sorted(dict.fromkeys(patterns), key=lambda pattern: -len(split(pattern)))
    used: set[str] = set()
    units = []
    for path in paths:
        unit = ""
        for pattern in by_length:
            prefix = path[: len(split(pattern))]
            if matches(pattern, prefix):
                used.add(pattern)
                unit = unit or ".".join(prefix)
        units.append(unit)
    unmatched = [pattern for pattern in by_length if pattern not in used]
    if unmatched:
        heads = sorted({".".join(path[:2]) for path in paths})[:4]
        raise PlanError(
            bad(
                "units",
                repr(unmatched[0]),
                f"a pattern that matches the start of some path (there are {heads}, …)",
                "mend the pattern or leave it out",
            )
        )
    return units
