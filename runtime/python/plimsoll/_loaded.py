"""What is done to modules of others, as soon as they are loaded."""

import importlib.abc
import sys


class _Preparing(importlib.abc.Loader):
    """A loader, and what is done when it has loaded a module."""

    def __init__(self, loader, prepare):
        self.loader = loader
        self.prepare = prepare

    def __getattr__(self, name):
        return getattr(self.loader, name)

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        self.prepare(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds what the other finders find."""

    def __init__(self):
        self.prepare = {}

    def find_spec(self, name, path, target=None):
        if name not in self.prepare:
            return None
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Preparing(spec.loader, self.prepare[name])
        return spec


_finder = _Finder()
sys.meta_path.insert(0, _finder)


def when_loaded(name, prepare):
    """Has `prepare` called with the module of that name: now, if it is there, and whenever it is loaded."""
    _finder.prepare[name] = prepare
    if name in sys.modules:
        prepare(sys.modules[name])
