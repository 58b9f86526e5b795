"""A string on disk, recorded with everything that it depends on."""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path


class Record:
    """A record in a folder of kernels. Other facts are another record.

    - `facts`: by name, all that the recorded string depends on.
    """

    def __init__(self, folder: Path, facts: Mapping[str, str]) -> None:
        self.facts = dict(facts)
        name = _digest(self.facts)[:32]
        self.path = folder / f"headway-record-{name}.json"

    def read(self) -> str | None:
        """Return the recorded string; None if there is no record, or a damaged one."""
        with suppress(OSError, ValueError, TypeError, KeyError):
            record = json.loads(self.path.read_text())
            value = record["value"]
            if record["facts"] == self.facts and record["sha256"] == _digest([self.facts, value]):
                return value
        return None

    def write(self, value: str) -> None:
        """Record a string, if the folder is writable."""
        record = {"value": value, "facts": self.facts, "sha256": _digest([self.facts, value])}
        temporary = self.path.with_suffix(f".{os.getpid()}.part")
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(record, indent=1))
            os.replace(temporary, self.path)


def _digest(value: object) -> str:
    return sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
