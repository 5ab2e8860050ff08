"""xdist: all items of one loop go to one worker, which makes the loop's evidence once."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_trainloop.frontends.plugin.nodeids import scopes


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    if config.getoption("dist") != "load":
        return None
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped, import-not-found, unused-ignore]

    from pytest_trainloop.core import registry

    class LoopScheduling(LoadScopeScheduling):  # type: ignore[misc, unused-ignore]
        """One scope for each loop, and one for each ordinary test."""

        _scopes: dict[str, str] | None = None

        def _split_scope(self, nodeid: str) -> str:
            if self._scopes is None:
                self._scopes = scopes(self.collection or [], registry.registered())
            return self._scopes.get(nodeid, nodeid)

    return LoopScheduling(config, log)
