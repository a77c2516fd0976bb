"""What every test shares: the pool of real ranks, and when a test is skipped."""

from __future__ import annotations

import pytest
import torch

import pool


def pytest_configure(config: pytest.Config) -> None:
    command_line = config.known_args_namespace.pythonwarnings or []
    pool.configure([*config.getini("filterwarnings"), *command_line])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpus = torch.cuda.device_count()
    for item in items:
        marker = item.get_closest_marker("cuda")
        if marker is not None and (needed := marker.kwargs.get("gpus", 1)) > gpus:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA device(s), found {gpus}"))


@pytest.fixture(scope="session", autouse=True)
def _warm_pool(request: pytest.FixtureRequest) -> None:
    """Let the pool import torch while the first tests run.

    A fixture and not an earlier hook: here pytest captures output, so what ranks print is shown with the test
    that fails.
    """
    if any(hasattr(getattr(item, "module", None), "run_ranks") for item in request.session.items):
        pool.warm_up()


def pytest_unconfigure() -> None:
    pool.shutdown()
