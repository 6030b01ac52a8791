"""Continual learning of vision-language-action models: `train`, `practice`, `agents`, `evaluate`, `compare`, `open_run`, `load_policy`."""
__version__ = "0.1.0"
__all__ = ["train", "practice", "agents", "evaluate", "compare", "open_run", "load_policy"]


def __getattr__(name):
    "A name of `clvla.api`, which is imported when the first of them is used: it loads torch."
    if name not in __all__: raise AttributeError(f"module 'clvla' has no attribute {name!r}; it has {', '.join(__all__)}")
    from clvla import api
    return getattr(api, name)


def __dir__(): return [*globals(), *__all__]
