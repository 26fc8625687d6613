"""The versions that must be the same on every machine of a run."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

from toffee_dist.errors import ConfigError


def versions() -> dict[str, str]:
    """Return those of this process."""
    # Saves start-up time.
    import dask
    import distributed
    import numpy
    import scipy

    from toffee_dist import __version__

    return {
        "toffee_dist": __version__,
        "python": ".".join(platform.python_version_tuple()[:2]),
        "numpy": numpy.__version__,
        "scipy": scipy.__version__,
        "dask": dask.__version__,
        "distributed": distributed.__version__,
    }


def check_versions(where: str, found: Mapping[str, str]) -> None:
    """Raise ConfigError where another process has other versions than this one."""
    for name, version in versions().items():
        if found.get(name) != version:
            raise ConfigError(
                f"{name} of {where}",
                got=found.get(name, "none"),
                allowed=f"{version}, as here",
                remedy="Run client, scheduler and workers from one environment or image.",
            )


def check_scheduler(client: Any) -> None:
    """Raise ConfigError where the scheduler is of another version, or cannot run our code at all."""
    try:
        found = client.run_on_scheduler(versions)
    except OSError:
        raise
    except Exception as error:
        raise ConfigError(
            "the scheduler cannot run our code",
            got=f"{type(error).__name__}: {error}",
            allowed="the same toffee_dist on scheduler and workers",
            remedy="Run client, scheduler and workers from one environment or image.",
        ) from None
    check_versions("the scheduler", found)
