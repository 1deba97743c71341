# SPDX-License-Identifier: Apache-2.0
"""Package mapping: the top-level folder `backends/` installs as `hyper_parallel.backends`.

Everything else about the distribution is in pyproject.toml. Packages are found, not listed, so that
a new room or a new backend needs no line here.
"""

from setuptools import find_packages, setup

BACKENDS = "hyper_parallel.backends"


def packages() -> list[str]:
    """Return every package of the distribution under its installed name."""
    rooms = find_packages(include=["hyper_parallel", "hyper_parallel.*"])
    backends = find_packages("backends")
    return [*rooms, BACKENDS, *(f"{BACKENDS}.{name}" for name in backends)]


setup(packages=packages(), package_dir={BACKENDS: "backends"})
