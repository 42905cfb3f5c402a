"""JSON Schema (2020-12) of a record's line and of the report's document, from the dataclasses themselves.

Fields with a default came with a later minor schema: older files lack them. Others may join, so that unknown ones are
allowed.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import inspect
import json
import types
import typing
from collections.abc import Mapping
from typing import Any

from harness.records import SCHEMA as RECORD_SCHEMA
from harness.records import Record
from harness.report.document import SCHEMA as DOCUMENT_SCHEMA
from harness.report.document import Document

DIALECT = "https://json-schema.org/draft/2020-12/schema"
NOT_FINITE = ("nan", "inf", "-inf")
_SIMPLE: dict[Any, dict[str, Any]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    bool: {"type": "boolean"},
    float: {"anyOf": [{"type": "number"}, {"enum": list(NOT_FINITE)}]},
    datetime.date: {"type": "string", "format": "date"},
    type(None): {"type": "null"},
}


def schemas() -> dict[str, str]:
    """File names and their text."""
    made = {
        "record.schema.json": _schema(Record, "record", RECORD_SCHEMA, "One line of a records file."),
        "report.schema.json": _schema(Document, "report", DOCUMENT_SCHEMA, "What `--json` writes."),
    }
    return {name: json.dumps(s, indent=1, ensure_ascii=False) + "\n" for name, s in made.items()}


def _schema(cls: type[Any], name: str, version: str, told: str) -> dict[str, Any]:
    definitions: dict[str, Any] = {}
    major = version.partition(".")[0]
    _of(cls, definitions)
    root = definitions.pop(cls.__name__)
    root["properties"]["schema"] = {"type": "string", "pattern": rf"^{major}\.[0-9]+$"}
    return {
        "$schema": DIALECT,
        "$id": f"urn:attention-harness:{name}:{version}",
        "title": f"attention-harness {name}, schema {version}",
        **root,
        "description": f"{told} {root['description']}",
        "$defs": dict(sorted(definitions.items())),
    }


def _of(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    """The schema of a type; dataclasses and enums go into `definitions`."""
    if kind in _SIMPLE:
        return _SIMPLE[kind]
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return {"anyOf": [option for a in arguments for option in _options(_of(a, definitions))]}
    if origin is frozenset:
        return {"type": "array", "items": _of(arguments[0], definitions), "uniqueItems": True}
    if origin is tuple:
        return _array(arguments, definitions)
    if origin in (dict, Mapping):
        return {"type": "object", "additionalProperties": _of(arguments[1], definitions)}
    if not isinstance(kind, type) or not (issubclass(kind, enum.Enum) or dataclasses.is_dataclass(kind)):
        raise TypeError(f"no schema for {kind!r}; give _SIMPLE or _of a rule for it")
    if kind.__name__ not in definitions:
        definitions[kind.__name__] = {}  # holds the place, should a type contain itself
        definitions[kind.__name__] |= _defined(kind, definitions)
    return {"$ref": f"#/$defs/{kind.__name__}"}


def _options(schema: dict[str, Any]) -> list[dict[str, Any]]:
    return schema["anyOf"] if set(schema) == {"anyOf"} else [schema]


def _array(arguments: tuple[Any, ...], definitions: dict[str, Any]) -> dict[str, Any]:
    if arguments[-1] is Ellipsis:
        return {"type": "array", "items": _of(arguments[0], definitions)}
    items = [_of(a, definitions) for a in arguments]
    return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}


def _defined(kind: type[Any], definitions: dict[str, Any]) -> dict[str, Any]:
    told = {"description": " ".join((inspect.getdoc(kind) or "").split())}
    if issubclass(kind, enum.Enum):
        return {**told, "enum": [member.value for member in kind]}
    hints = typing.get_type_hints(kind)
    fields = dataclasses.fields(kind)
    missing = dataclasses.MISSING
    needed = [f.name for f in fields if f.default is missing and f.default_factory is missing]
    return {
        **told,
        "type": "object",
        "properties": {f.name: _of(hints[f.name], definitions) for f in fields},
        "required": needed,
    }
