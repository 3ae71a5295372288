"""The fields of a model's config: from a file, a dict or a config object."""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from mlakit.model.releases import ALIASES, RELEASES, is_glm5_next_type

FILE = "config.json"
DEFAULT_INDEX_POOL = 16  # of transformers, for a config of GLM-5.3-Flash's type that has no number


class ConfigFields:
    """The fields of one config by name; error messages name it `source`."""

    def __init__(self, config: object, source: str) -> None:
        self._config = config
        self.source = source

    def get(self, name: str, default: Any = None) -> Any:
        """A field, or `default` if it is missing or null."""
        value = self.stored(name)
        return default if value is None else value

    def stored(self, name: str, default: Any = None) -> Any:
        """A field, or `default` if it is missing."""
        if isinstance(self._config, Mapping):
            return self._config.get(name, default)
        return getattr(self._config, name, default)

    def integer(self, name: str, default: int | None = None) -> int:
        """An integer field, required if there is no `default`."""
        value = self.get(name, default)
        if value is None:
            raise ValueError(f"{self.source} has no {name}: not an MLA config")
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError(f"{self.source}: {name} must be an integer, got {value!r}")
        return operator.index(value)

    def number(self, name: str, value: object) -> float:
        """`value` of the field `name`, which must be a number."""
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{self.source}: {name} must be a number, got {value!r}")
        return value


def index_pool(fields: ConfigFields) -> int:
    """The tokens whose index keys are pooled to one (GLM-5.3-Flash); 1 in other models."""
    default = DEFAULT_INDEX_POOL if is_glm5_next_type(fields.get("model_type")) else 1
    tokens = fields.integer("index_kpool", default)
    if tokens < 1:
        raise ValueError(f"{fields.source}: index_kpool must be at least 1, got {tokens}")
    return tokens


def config_path(path: str | os.PathLike[str]) -> Path | None:
    """The config.json at `path` or in the folder `path`; None if there is none."""
    found = os.path.expanduser(path)
    if os.path.isdir(found):
        found = os.path.join(found, FILE)
    return Path(found) if os.path.isfile(found) else None  # False also for an invalid path


def config_fields(config: object) -> ConfigFields:
    """`read_config` of what `MLAGeometry.from_config` takes: the name of a known model, too."""
    if isinstance(config, str) and config_path(config) is None:
        config = RELEASES[ALIASES.get(config.lower(), config.lower())]
    return read_config(config)


def read_config(config: object) -> ConfigFields:
    """The fields of the text model of `config`: a path, a dict or a config object."""
    if isinstance(config, str | os.PathLike):
        fields = _read_file(config)
    elif isinstance(config, Mapping):
        fields = ConfigFields(config, f"config {type(config).__name__}")
    elif config is None or isinstance(config, int | float | Collection):
        raise TypeError(
            f"config must be the name of a known model, the path of a {FILE} or of its folder, "
            f"a dict or a config object, got {type(config).__name__}"
        )
    else:
        fields = ConfigFields(config, f"config {type(config).__name__}")
    # a multimodal model has the config of its language model inside its own
    nested = fields.get("text_config")
    return fields if nested is None else ConfigFields(nested, _nested_source(fields, nested))


def _nested_source(outer: ConfigFields, nested: object) -> str:
    if isinstance(nested, Mapping):
        return f"text_config of {outer.source}"
    return f"config {type(nested).__name__}"


def _read_file(path: str | os.PathLike[str]) -> ConfigFields:
    file = config_path(path)
    if file is None:
        raise FileNotFoundError(f"config: there is no {FILE} at {os.fspath(path)!r}")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # not UTF-8 or not JSON
        raise ValueError(f"config {file} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"config {file} must be a JSON object, got a {type(content).__name__}")
    return ConfigFields(content, f"config {file}")
