"""Reads survivors.toml: the mutants that no check can catch, each with its reason."""

from __future__ import annotations

import sys
from pathlib import Path

from mlakit.tools.emulator.campaign import SUBJECTS
from mlakit.tools.emulator.mutations import Name

if sys.version_info >= (3, 11):
    import tomllib
else:  # pytest brings it where the standard library has none
    import tomli as tomllib

FILE = Path(__file__).with_name("survivors.toml")
KINDS = ("redundant: ", "not reached: ", "not modelled: ")


def survivors(file: Path = FILE) -> dict[str, dict[Name, str]]:
    """Return the reason of each mutant that survives, by subject."""
    read = tomllib.loads(file.read_text(encoding="utf-8"))
    found: dict[str, dict[Name, str]] = {subject: {} for subject in SUBJECTS}
    for subject, entries in read.items():
        if subject not in SUBJECTS:
            raise ValueError(f"{file.name}: {subject} must be one of {', '.join(SUBJECTS)}")
        for entry in entries:
            if not entry["reason"].startswith(KINDS):
                raise ValueError(f"{file.name}: a reason must begin with one of {KINDS}: {entry}")
            for ordinal in entry["ordinals"]:
                name = Name(
                    SUBJECTS[subject].kernel, entry["function"], entry["operation"], ordinal
                )
                found[subject][name] = entry["reason"]
    return found
