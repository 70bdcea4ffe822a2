"""What a part of the check has found, and the form in which its process hands it over."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Finding:
    """A fact about the device beside what it should be; `limit` says so in words, "" where nothing is demanded."""

    what: str
    found: float | str
    limit: str
    holds: bool


@dataclasses.dataclass
class Findings:
    """All of one part; `figures` go into the file of the card as they are."""

    listed: list[Finding] = dataclasses.field(default_factory=list)
    figures: dict[str, Any] = dataclasses.field(default_factory=dict)

    def note(self, what: str, found: float | str) -> None:
        """Adds a figure of which nothing is demanded."""
        self.listed.append(Finding(what, found, "", True))

    def at_most(self, what: str, found: float, limit: float) -> None:
        self.listed.append(Finding(what, found, f"at most {limit:g}", found <= limit))  # NaN does not hold

    def at_least(self, what: str, found: float, limit: float) -> None:
        self.listed.append(Finding(what, found, f"at least {limit:g}", found >= limit))

    def between(self, what: str, found: float, low: float, high: float) -> None:
        self.listed.append(Finding(what, found, f"{low:g} to {high:g}", low <= found <= high))

    def true(self, what: str, holds: bool, found: str = "") -> None:
        self.listed.append(Finding(what, found or ("yes" if holds else "no"), "yes", holds))

    @property
    def failed(self) -> list[Finding]:
        return [finding for finding in self.listed if not finding.holds]

    def to_dict(self) -> dict[str, Any]:
        return {"findings": [dataclasses.asdict(finding) for finding in self.listed], **self.figures}
