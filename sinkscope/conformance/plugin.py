"""The checks as tests of pytest: `pytest --sinkscope-cache module:factory`. Without the option nothing is imported."""

from __future__ import annotations

from typing import Any

import pytest

_PLACE = "--sinkscope-cache"
_TOLERANCE = "--sinkscope-tolerance"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("sinkscope")
    group.addoption(_PLACE, metavar="MODULE:FACTORY", help="check the KV cache that this function gives")
    group.addoption(_TOLERANCE, type=float, metavar="X", help="largest error of logits, in standard deviations")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add a test for each check."""
    place = config.getoption(_PLACE)
    if place is None:
        return
    from sinkscope.conformance.checks import CHECKS
    from sinkscope.conformance.kit import TOLERANCE, Kit
    from sinkscope.conformance.subject import factory_named, without_budget
    from sinkscope.errors import SinkscopeError

    place = without_budget(place)
    try:
        kit = Kit(place, factory_named(place), config.getoption(_TOLERANCE) or TOLERANCE)
        kit.subject()
    except SinkscopeError as error:
        raise pytest.UsageError(str(error)) from None
    parent = _Checks.from_parent(session, name=place, nodeid=place)
    for name, check in CHECKS.items():
        items.append(_Check.from_parent(parent, name=name, kit=kit, check=check))


class _Checks(pytest.Collector):
    def collect(self) -> list[pytest.Item]:
        """Nothing: the checks are no tests of a file."""
        return []


class _Check(pytest.Item):
    def __init__(self, *, kit: Any, check: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._kit, self._check = kit, check

    def runtest(self) -> None:
        """Run the check; one that does not apply is skipped."""
        one = self._kit.checked(self._check)
        if one.verdict == "does not apply":
            pytest.skip(one.seen)
        if one.verdict == "fails":
            pytest.fail(f"Expected: {one.expected}.\nSeen: {one.seen}.\n{one.reproduction}", pytrace=False)

    def reportinfo(self) -> Any:
        """The factory, and the behaviour."""
        return self.path, None, f"{self._kit.place}: {self.name}"
