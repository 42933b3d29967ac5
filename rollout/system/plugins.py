"""Builds the objects that a recipe names by import path: workflows, rewards, group filters."""

import difflib
import importlib
import importlib.util
import inspect
import os
import sysconfig
from collections.abc import Mapping
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:  # a judge process constructs its reward without loading the schema
    from slipstream.configs.schema import PluginConfig


class PluginError(ImportError):
    """An import path of the recipe cannot be imported, or its object cannot be constructed."""


class PluginFailed(RuntimeError):
    """An object that the recipe names has raised, or has returned what cannot be used. The message says which
    setting names it, where its code is, what was expected and what was found."""


class BuiltPlugin:
    """An object that a recipe names, with the setting that names it: errors about it name both."""

    def __init__(self, setting: str, plugin: "PluginConfig") -> None:
        """Construct the object. Raises PluginError."""
        self.setting = setting
        self.path = plugin.path
        self.object = build(plugin)

    def call(self, method: str, *args: object) -> object:
        """Return what the method returns. Raises PluginFailed for whatever it raises."""
        try:
            return getattr(self.object, method)(*args)
        except Exception as error:
            place = "" if place_of(error) else f" at {place_of_code(getattr(self.object, method))}"
            raise PluginFailed(f"{self._named(method)}: {raised(error)}{place}") from error

    def wrong(self, method: str, problem: str) -> PluginFailed:
        """Return the error about something that the method has returned: ``problem`` says what."""
        place = place_of_code(getattr(self.object, method))
        return PluginFailed(f"{self._named(method)} at {place} {problem}")

    def _named(self, method: str) -> str:
        return f"{self.setting}: {self.path}.{method}"


def place_of_code(function: object) -> str:
    """Return where a function or a class is defined: ``FILE:LINE``; its module if it is not in Python."""
    try:
        lines = inspect.getsourcelines(inspect.unwrap(cast("Any", function)))[1]
        return f"{inspect.getsourcefile(inspect.unwrap(cast('Any', function)))}:{lines}"
    except (TypeError, OSError, ValueError):
        return str(getattr(function, "__module__", "an unknown place"))


def resolve(path: str) -> Any:
    """Return the object at ``package.module.Name``. Raises PluginError.

    The object is the user's, so its type is not known here: the caller annotates what it expects.
    """
    module_path, _, name = path.rpartition(".")
    module = _imported(module_path, path)
    try:
        return getattr(module, name)
    except AttributeError:
        near = difflib.get_close_matches(name, [known for known in vars(module) if known[0] != "_"], n=1)
        way_out = f"; did you mean {near[0]!r}?" if near else f"; expected a name in {_file_of(module)}"
        raise PluginError(f"{path}: {module_path} has no {name!r}{way_out}") from None


def resolved(paths: Mapping[str, str]) -> dict[str, Any]:
    """Return the modules or objects at several import paths, by the same names. Raises PluginError."""
    return {name: resolve_module(path) for name, path in paths.items()}


def resolve_module(path: str) -> Any:
    """Return the module or the object at an import path. Raises PluginError."""
    package, _, name = path.rpartition(".")
    parent = _imported(package, path)
    is_module = hasattr(parent, "__path__") and importlib.util.find_spec(path) is not None
    if hasattr(parent, name) or not is_module:
        return resolve(path)
    return _imported(path, path)


def _imported(module: str, path: str) -> ModuleType:
    """Return a module. Raises PluginError, which names the import ``path`` that needs it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        way_out = "install it, add its folder to PYTHONPATH, or correct the path"
        raise PluginError(f"{path}: cannot import {module}: {error}; {way_out}") from error
    except BaseException as error:  # user code: its import may raise anything, and exit
        if isinstance(error, GeneratorExit | KeyboardInterrupt):
            raise
        raise PluginError(f"{path}: cannot import {module}: {raised(error)}") from error


def _file_of(module: object) -> str:
    return str(getattr(module, "__file__", None) or "it")


def raised(error: BaseException) -> str:
    """Return what user code has raised, and the place: ``it raised KeyError: 'x' at FILE:LINE, in
    FUNCTION``."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{type(error).__name__} at {error.filename}:{error.lineno}: {error.msg}"
    place = place_of(error)
    return f"it raised {type(error).__name__}: {error}{' ' if place else ''}{place}"


def build(plugin: "PluginConfig") -> Any:
    """Construct the class that ``plugin`` names with the recipe's arguments. Raises PluginError."""
    return construct(plugin.path, plugin.args)


def construct(path: str, args: Mapping[str, object]) -> Any:
    """Construct the class at ``path`` with keyword arguments. Raises PluginError."""
    factory = resolve(path)
    check_args(path, factory, args)
    try:
        return factory(**args)
    except TypeError as error:
        raise PluginError(_cannot(path, args, str(error))) from error


def check_args(path: str, factory: object, args: Mapping[str, object], *, given: int = 0) -> None:
    """Compare keyword arguments with the parameters of a class or function, without calling it.

    ``given``: number of its first parameters that get their values elsewhere. Raises PluginError with every
    argument that is unknown and every one that is missing.
    """
    if not callable(factory):
        raise PluginError(
            _cannot(path, args, f"it is of type {type(factory).__name__}, expected a class or a function")
        )
    try:
        parameters = list(inspect.signature(factory).parameters.values())[given:]
    except (TypeError, ValueError):  # a callable that Python cannot look into
        return
    named = {
        each.name: each
        for each in parameters
        if each.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    }
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
    problems = [] if takes_any else [_unknown(name, list(named)) for name in args if name not in named]
    missing = [name for name, each in named.items() if each.default is each.empty and name not in args]
    problems += [f"`{name}` is missing" for name in missing]
    if problems:
        raise PluginError(_cannot(path, args, "; ".join(problems)))


def place_of(error: BaseException) -> str:
    """Return the place in user code where an error was raised: ``at FILE:LINE, in FUNCTION``.

    It is the innermost frame that belongs neither to Slipstream nor to a library, of the error itself or of
    the one that has caused it; empty if there is none. An error of ours about user code is of its cause.
    """
    seen: set[int] = set()
    place = ""
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        place = _user_frame(cause.__traceback__) or place
        if place and not type(cause).__module__.startswith("slipstream."):
            return place
        cause = _first_of(cause) or cause.__cause__ or cause.__context__
    return place


def _first_of(error: BaseException) -> BaseException | None:
    """Return the first error of a group."""
    if not isinstance(error, BaseExceptionGroup):
        return None
    return cast("BaseExceptionGroup[BaseException]", error).exceptions[0]


def _user_frame(frames: TracebackType | None) -> str:
    place = ""
    while frames is not None:
        code = frames.tb_frame.f_code
        if not _is_ours(frames.tb_frame.f_globals) and not code.co_filename.startswith(_LIBRARIES):
            place = f"at {code.co_filename}:{frames.tb_lineno}, in {code.co_name}"
        frames = frames.tb_next
    return place


_LIBRARIES = ("<", *{sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")})
"""Beginnings of the file names of code that is not the user's."""


def _is_ours(module: Mapping[str, object]) -> bool:
    return str(module.get("__name__", "")).startswith("slipstream.")


def _unknown(name: str, known: list[str]) -> str:
    nearest = difflib.get_close_matches(name, known, n=1)
    expected = f"did you mean `{nearest[0]}`?" if nearest else f"expected one of {', '.join(known) or 'none'}"
    return f"`{name}` is unknown: {expected}"


def _cannot(path: str, args: Mapping[str, object], reason: str) -> str:
    return f"{path} cannot be constructed from args {dict(args)}: {reason}"
