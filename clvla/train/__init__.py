"""Learning by imitation along a stream. The room's name is that of `clvla.api.train`, too: `clvla.train("er")` trains."""
import sys
from types import ModuleType


class _Room(ModuleType):
    "A package that can be called, because Python binds the name `clvla.train` to it as soon as a module in it is imported."
    def __call__(self, *args, **settings):
        from clvla.api import train
        return train(*args, **settings)


sys.modules[__name__].__class__ = _Room
