"""What is done to modules of others, as soon as they are loaded."""

import importlib.abc
import importlib.util
import sys


class _WhenLoaded(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, name, prepare):
        self.name = name
        self.prepare = prepare

    def find_spec(self, name, path, target=None):
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None:
            self.loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        self.prepare(module)


def when_loaded(name, prepare):
    """Has `prepare` called with the module of that name: now, or when it is loaded."""
    if name in sys.modules:
        prepare(sys.modules[name])
    else:
        sys.meta_path.insert(0, _WhenLoaded(name, prepare))
