"""Write docs/api.md from the docstrings of the public names.

    python docs/make_api.py            writes the page
    python docs/make_api.py --check    exits with 1 when the page on disk is another one

The page depends on the sources alone: not on the Python version, the hash seed or memory addresses.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import doctest
import enum
import functools
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

PAGE = Path(__file__).with_name("api.md")
PACKAGE = "mfsdp_fn"
NAMESPACES = (PACKAGE, f"{PACKAGE}.checkpoint", f"{PACKAGE}.optim", f"{PACKAGE}.testing")
WIDTH = 90
SECTIONS = ("Args", "Returns", "Yields", "Raises", "Attributes", "Example", "Examples", "Note", "Notes")
LISTS = ("Args", "Raises", "Attributes")  # sections made of `name: text` entries


def main() -> int:
    """Write or check the page; return the exit code."""
    parser = argparse.ArgumentParser(description="Write docs/api.md from the docstrings.")
    parser.add_argument("--check", action="store_true", help="only compare, exit with 1 on a difference")
    check = parser.parse_args().check
    page, undocumented = render()
    for name in undocumented:
        print(f"{name} has no docstring", file=sys.stderr)
    if check:
        on_disk = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
        if on_disk != page:
            diff = difflib.unified_diff(on_disk.splitlines(), page.splitlines(), "on disk", "now", lineterm="")
            print("\n".join(list(diff)[:40]), file=sys.stderr)
            print(f"docs/{PAGE.name} is stale: run `python docs/make_api.py`.", file=sys.stderr)
            return 1
    else:
        PAGE.write_text(page, encoding="utf-8")
    return 1 if undocumented else 0


def render() -> tuple[str, list[str]]:
    """Return the page and the public names that have no docstring."""
    undocumented: list[str] = []
    sections: list[str] = []
    contents: list[str] = []
    for module, names in sorted(_by_module().items()):
        contents.append(f"- [`{module}`](#{_anchor(module)}): " + ", ".join(f"`{name}`" for name, _ in names))
        sections.append(f"## `{module}`\n")
        intro = _summary(importlib.import_module(module))
        if intro:
            sections.append(intro + "\n")
        for name, value in names:
            if not _own_doc(value) and not _is_plain_value(value):
                undocumented.append(name)
            sections.extend(_entry(name, value))
    head = [
        "# API\n",
        "<!-- Written by docs/make_api.py from the docstrings. Change those, not this page. -->\n",
        f"Names are shown as a user writes them after `import {PACKAGE} as mf`.\n",
        "\n".join(contents) + "\n",
    ]
    return "\n".join(head + sections).rstrip() + "\n", undocumented


def _by_module() -> dict[str, list[tuple[str, Any]]]:
    """Public names and their values, grouped by the module that defines them, in order of definition."""
    found: dict[str, dict[str, Any]] = {}
    seen: set[int] = set()
    for namespace in NAMESPACES:
        if importlib.util.find_spec(namespace) is None:
            continue
        module = importlib.import_module(namespace)
        for name in sorted(getattr(module, "__all__", ())):
            value = getattr(module, name)
            if isinstance(value, ModuleType) or name.startswith("__"):
                continue
            if not _is_plain_value(value):
                if id(value) in seen:  # exported from two places: the shorter name is the one to show
                    continue
                seen.add(id(value))
            home = getattr(value, "__module__", None)
            if not isinstance(home, str) or home.split(".")[0] != PACKAGE:
                home = namespace
            shown = ".".join(["mf", *namespace.split(".")[1:], name])
            found.setdefault(home, {})[shown] = value
    return {module: sorted(names.items(), key=_line_of) for module, names in found.items()}


def _line_of(item: tuple[str, Any]) -> tuple[int, str]:
    name, value = item
    try:
        return inspect.getsourcelines(inspect.unwrap(value))[1], name
    except (TypeError, OSError):
        return 0, name


def _entry(name: str, value: Any) -> Iterator[str]:
    yield f"### `{name}`\n"
    if inspect.isclass(value):
        yield from _class_entry(name, value)
    elif _is_plain_value(value):
        yield f"```python\n{name} = {_value(value)}\n```\n"
    else:
        yield f"```python\n{_signature(name, value)}\n```\n"
        yield from _text(value)


def _class_entry(name: str, cls: type) -> Iterator[str]:
    if issubclass(cls, enum.Enum):
        yield "```python\n" + "\n".join(f"{name}.{member}" for member in cls.__members__) + "\n```\n"
    elif issubclass(cls, BaseException):
        bases = ", ".join(base.__name__ for base in cls.__bases__)
        yield f"```python\nclass {name}({bases})\n```\n"
    else:
        yield f"```python\n{_signature(f'class {name}', cls)}\n```\n"
    yield from _text(cls)
    for attribute, member in vars(cls).items():
        if attribute.startswith("_"):
            continue
        short = f"{cls.__name__}.{attribute}"
        if isinstance(member, property | functools.cached_property):
            getter = member.fget if isinstance(member, property) else member.func
            if getter is not None and _own_doc(getter):
                yield f"#### `{short}`\n"
                returns = _annotation(inspect.signature(getter).return_annotation)
                yield f"```python\n{short}: {returns}\n```\n" if returns else ""
                yield from _text(getter)
        elif isinstance(member, classmethod | staticmethod) or inspect.isfunction(member):
            function = getattr(cls, attribute)
            if _own_doc(function):
                yield f"#### `{short}`\n"
                is_instance_method = inspect.isfunction(member)
                yield f"```python\n{_signature(short, function, skip_self=is_instance_method)}\n```\n"
                yield from _text(function)


# Signatures.


def _signature(name: str, value: Callable[..., Any], *, skip_self: bool = False) -> str:
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return f"{name}(...)"
    parameters = list(signature.parameters.values())[1 if skip_self else 0 :]
    pieces: list[str] = []
    starred = False
    for index, parameter in enumerate(parameters):
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            pieces.append("*")
            starred = True
        starred = starred or parameter.kind is parameter.VAR_POSITIONAL
        pieces.append(_parameter(parameter))
        following = parameters[index + 1].kind if index + 1 < len(parameters) else None
        if parameter.kind is parameter.POSITIONAL_ONLY and following is not parameter.POSITIONAL_ONLY:
            pieces.append("/")
    returns = "" if inspect.isclass(value) else _annotation(signature.return_annotation)
    tail = f" -> {returns}" if returns else ""
    line = f"{name}({', '.join(pieces)}){tail}"
    if len(line) <= WIDTH or not pieces:
        return line
    return f"{name}(\n" + "".join(f"    {piece},\n" for piece in pieces) + f"){tail}"


def _parameter(parameter: inspect.Parameter) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    annotation = _annotation(parameter.annotation)
    text = f"{stars}{parameter.name}" + (f": {annotation}" if annotation else "")
    if parameter.default is parameter.empty:
        return text
    return text + (" = " if annotation else "=") + _value(parameter.default)


def _annotation(annotation: Any) -> str:
    if annotation is inspect.Signature.empty:
        return ""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"\b(?:typing|collections\.abc)\.", "", text)


def _value(value: Any) -> str:
    """A default or constant as a reader would write it; never an address."""
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, type) or inspect.isroutine(value):
        return value.__qualname__
    if isinstance(value, tuple) and type(value) is tuple:
        inner = ", ".join(map(_value, value))
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if dataclasses.is_dataclass(value):
        changed = []
        for field in dataclasses.fields(value):
            current = getattr(value, field.name)
            if field.init and field.repr and not _is_default(field, current):
                changed.append(f"{field.name}={_value(current)}")
        return f"{type(value).__name__}({', '.join(changed)})"
    if isinstance(value, frozenset | set):
        return "{" + ", ".join(sorted(map(_value, value))) + "}"
    text = repr(value)
    return "..." if " at 0x" in text or text == "<factory>" else text


def _is_default(field: dataclasses.Field[Any], current: Any) -> bool:
    if field.default is not dataclasses.MISSING:
        return bool(field.default == current)
    return field.default_factory is not dataclasses.MISSING and bool(field.default_factory() == current)


def _is_plain_value(value: Any) -> bool:
    return not (inspect.isclass(value) or callable(value))


# Docstrings.


def _own_doc(value: Any) -> str:
    """The docstring that was written for this object, not one that Python made up or that it inherits."""
    doc = vars(value).get("__doc__") if inspect.isclass(value) else getattr(value, "__doc__", None)
    if not isinstance(doc, str):
        return ""
    if inspect.isclass(value) and dataclasses.is_dataclass(value) and doc.startswith(f"{value.__name__}("):
        return ""
    return inspect.cleandoc(doc)


def _summary(module: ModuleType) -> str:
    return inspect.cleandoc(module.__doc__ or "").split("\n\n")[0].replace("\n", " ")


def _text(value: Any) -> Iterator[str]:
    doc = _own_doc(value)
    if doc:
        yield _markdown(doc) + "\n"


def _markdown(doc: str) -> str:
    """Google sections become bold headings with lists, doctests become code blocks."""
    out: list[str] = []
    lines = doc.splitlines()
    i = 0
    while i < len(lines):
        heading = re.fullmatch(r"(\w+):", lines[i])
        if heading is None or heading[1] not in SECTIONS:
            out.append(lines[i])
            i += 1
            continue
        i += 1
        body: list[str] = []
        while i < len(lines) and (not lines[i].strip() or lines[i].startswith(" ")):
            body.append(lines[i])
            i += 1
        text = inspect.cleandoc("\n" + "\n".join(body))
        if out and out[-1].strip():
            out.append("")
        out += [f"**{heading[1]}**", ""]
        out += _entries(text) if heading[1] in LISTS else text.splitlines()
        out.append("")
    return _fence_code(re.sub(r"``([^`]+)``", r"`\1`", "\n".join(out))).strip("\n")


def _entries(text: str) -> list[str]:
    out: list[str] = []
    for line in text.splitlines():
        entry = re.fullmatch(r"(\*{0,2}[\w.]+(?:, \*{0,2}[\w.]+)*)(?: \(.*?\))?: ?(.*)", line)
        if entry is not None:
            out.append(f"- `{entry[1]}`: {entry[2]}".rstrip())
        elif line.strip():
            out.append(f"  {line.strip()}")
    return out


def _fence_code(text: str) -> str:
    """Put doctests and indented code in fences."""
    out: list[str] = []
    for paragraph in re.split(r"\n{2,}", text):
        lines = paragraph.split("\n")
        first = next((k for k, line in enumerate(lines) if line.lstrip().startswith(">>> ")), None)
        if first is None and all(line.startswith("    ") for line in lines):
            first = 0
        if first is None:
            out.append(paragraph)
            continue
        if first:
            out.append("\n".join(lines[:first]))
        code = inspect.cleandoc("\n" + "\n".join(lines[first:]))
        out.append("```python\n" + _as_users_write(code) + "\n```")
    return "\n\n".join(out)


def _as_users_write(code: str) -> str:
    """A doctest with `mf.` before the public names that are its module's own, and without their imports."""
    lines = code.split("\n")
    examples = [(e, ast.parse(e.source)) for e in doctest.DocTestParser().get_examples(code)]
    nodes = [node for _, tree in examples for node in ast.walk(tree)]
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE)]
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    public = {name: shown for name, shown in _public_names().items() if name not in bound}
    places = []
    for example, tree in examples:
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and node.id in public:
                column = node.col_offset + example.indent + len(">>> ")
                places.append((example.lineno + node.lineno - 1, column, node.id))
    for line, column, name in sorted(places, reverse=True):
        lines[line] = lines[line][:column] + public[name] + lines[line][column + len(name) :]
    gone = {example.lineno for example, tree in examples for node in tree.body if node in imports}
    return "\n".join(line for number, line in enumerate(lines) if number not in gone)


@functools.cache
def _public_names() -> dict[str, str]:
    found: dict[str, str] = {}
    for namespace in reversed(NAMESPACES):
        module = importlib.import_module(namespace)
        names = getattr(module, "__all__", None) or [n for n, v in vars(module).items() if inspect.isfunction(v)]
        found |= {name: ".".join(["mf", *namespace.split(".")[1:], name]) for name in names}
    return found


def _anchor(module: str) -> str:
    return re.sub(r"[^\w-]", "", module.lower())


if __name__ == "__main__":
    sys.exit(main())
