"""The tasks of the benchmark, a file each; importing this package registers them all."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

for _file in iter_modules(__path__):
    import_module(f"{__name__}.{_file.name}")
