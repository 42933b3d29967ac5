"""The script that runs within sandboxes: serves calls of a program, or evaluates statements about a program.

    python code_calls.py serve PROGRAM < {"ops": [...]}            > {"outcomes": [...]}
    python code_calls.py check < {"statements", "own", "ops", "answer"}  > {"passed": ...} or {"ops": [...]}

Both run in sandboxes of their own, so that a program can reach neither the statements nor their verdict. Only
plain data crosses: numbers, texts, and containers of them, rebuilt from JSON as the types of Python itself. A
method that a program defines, such as ``__eq__``, therefore never decides. Objects stay in their process, and
statements use them by reference.

The statements do not wait for an outcome. At the first use of the program whose outcome is unknown, checking
turns into recording: each use is written down, an assertion may fail, and what needs an outcome is left out
or ends the recording. The program is then run with all uses so far, and the statements begin again. They have
passed when they have run to their end without recording.

An operation: [kind, target, arguments]. A target: ["name", N], ["attr", target, N] or ["result", number].
"""

# pyright: basic
# Only the standard library: the Python of the sandbox need not have anything else.

import ast
import builtins
import collections
import datetime
import decimal
import fractions
import importlib
import itertools
import json
import operator
import os
import random
import site
import sys
import types
from typing import Any

MOST_OPS = 20_000
"""Uses of the program that are recorded before it is run."""

MOST_ITEMS = 10_000
"""Items of a generator that are returned."""

_MODULES = """
bisect collections copy datetime decimal fractions functools heapq itertools json math operator os random re
statistics string sys time typing
"""
MODULES = frozenset(_MODULES.split())
"""Modules that statements may use without importing them. A program cannot take their place."""


# ---- Plain data


class Opaque:
    """Stands for an object of a program within a container: equal to nothing but itself."""


def encoded(value: Any) -> Any:
    """Return ``value`` as JSON has it. Raises TypeError for an object that is no plain data."""
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__index__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, list):
        return [_item(each) for each in list.__iter__(value)]
    for name, kind in _SEQUENCES.items():
        if isinstance(value, kind):
            return {"is": name, "of": [_item(each) for each in kind.__iter__(value)]}
    if isinstance(value, dict):
        pairs = [[_item(key), _item(each)] for key, each in dict.items(value)]
        return {"is": "counter" if isinstance(value, collections.Counter) else "dict", "of": pairs}
    if isinstance(value, complex):
        return {"is": "complex", "of": [value.real, value.imag]}
    if isinstance(value, (bytes, bytearray)):
        return {"is": "bytearray" if isinstance(value, bytearray) else "bytes", "of": list(value)}
    for name, kind in _BY_ARGUMENTS.items():
        if type(value) is kind:
            return {"is": name, "of": [_item(each) for each in _ARGUMENTS_OF[name](value)]}
    if isinstance(value, (type({}.keys()), type({}.values()), type({}.items()))):
        kind = "set" if isinstance(value, type({}.keys())) else "list"
        return {"is": kind, "of": [_item(each) for each in value]}
    if type(value).__module__ in ("builtins", "itertools") and hasattr(value, "__next__"):
        return {"is": "iterator", "of": [_item(each) for each in itertools.islice(value, MOST_ITEMS)]}
    if type(value).__module__ == "numpy":
        kind = "array" if getattr(value, "ndim", 0) else None
        return (
            {"is": kind, "of": [str(value.dtype), encoded(value.tolist())]} if kind else encoded(value.item())
        )
    raise TypeError(f"{type(value).__name__} is no plain data")


def _item(value):
    if isinstance(value, Reference):
        return value._slipstream_sent()
    if isinstance(value, Opaque):
        return {"is": "opaque", "of": []}
    try:
        return encoded(value)
    except TypeError:
        return {"is": "object", "of": []}


_SEQUENCES = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": collections.deque,
}

_BY_ARGUMENTS = {
    "range": range,
    "decimal": decimal.Decimal,
    "fraction": fractions.Fraction,
    "datetime": datetime.datetime,
    "date": datetime.date,
    "time": datetime.time,
    "timedelta": datetime.timedelta,
}

_ARGUMENTS_OF = {
    "range": lambda value: [value.start, value.stop, value.step],
    "decimal": lambda value: [str(value)],
    "fraction": lambda value: [value.numerator, value.denominator],
    "datetime": lambda value: [
        value.year, value.month, value.day, value.hour, value.minute, value.second, value.microsecond
    ],
    "date": lambda value: [value.year, value.month, value.day],
    "time": lambda value: [value.hour, value.minute, value.second, value.microsecond],
    "timedelta": lambda value: [value.days, value.seconds, value.microseconds],
}  # fmt: skip


def decoded(value, referred=lambda target: Opaque()):
    """Return the value that ``encoded`` stands for. ``referred``: returns what a target stands for."""
    if isinstance(value, list):
        return [decoded(each, referred) for each in value]
    if not isinstance(value, dict):
        return value
    kind, content = value["is"], value["of"]
    if kind == "reference":
        return referred(content)
    if kind in ("object", "opaque"):
        return Opaque()
    if kind in ("dict", "counter"):
        pairs = {decoded(key, referred): decoded(each, referred) for key, each in content}
        return collections.Counter(pairs) if kind == "counter" else pairs
    if kind == "array":
        site.main()
        return importlib.import_module("numpy").array(decoded(content[1]), dtype=content[0])
    items = [decoded(each, referred) for each in content]
    if kind == "iterator":
        return iter(items)
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](items)
    if kind in _BY_ARGUMENTS:
        return _BY_ARGUMENTS[kind](*items)
    return {"complex": lambda parts: complex(*parts), "bytes": bytes, "bytearray": bytearray}[kind](items)


# ---- In the sandbox of the program


class Server:
    """Does operations on a program, in order."""

    def __init__(self, names):
        self._names = names
        self._results = []

    def outcome(self, operation):
        """Return {"value"}, {"object"} or {"error"}.

        "left" has the arguments as a call that returns None has changed them: another one is not meant to.
        """
        kind, target, arguments = operation
        try:
            given = decoded(arguments, self._found)
            result = self._done(kind, target, given)
        except BaseException as error:
            self._results.append(None)
            return {"error": [type(error).__name__, _builtin_of(error), str(error)[:1000]]}
        self._results.append(result)
        outcome = {}
        try:
            outcome["value"] = encoded(result)
        except TypeError:
            outcome["object"] = True
        if arguments and result is None:
            left = _item(given)
            if left != arguments:
                outcome["left"] = left
        return outcome

    def _done(self, kind, target, given):
        found = self._found(target)
        if kind == "call":
            positional, named = given
            return found(*positional, **named)
        return found if kind == "value" else _APPLIED[kind](found, *given)

    def _found(self, target):
        kind, *rest = target
        if kind == "result":
            return self._results[rest[0]]
        if kind == "attr":
            return getattr(self._found(rest[0]), rest[1])
        if rest[0] in self._names:
            return self._names[rest[0]]
        solution = self._names.get("Solution")
        if kind == "function" and hasattr(solution, rest[0]):
            return getattr(solution(), rest[0])
        raise NameError(f"name {rest[0]!r} is not defined")


_APPLIED = {
    "len": len,
    "str": str,
    "repr": repr,
    "iter": list,
    "contains": operator.contains,
    "getitem": operator.getitem,
    "setitem": operator.setitem,
    "delitem": operator.delitem,
    "setattr": setattr,
}


def _builtin_of(error):
    names = [each.__name__ for each in type(error).__mro__ if each.__module__ == "builtins"]
    return names[0]


def serve(path):
    """Run a program, then the operations of the standard input, and print their outcomes."""
    asked = json.loads(sys.stdin.buffer.read())
    output = _own_output()
    module = types.ModuleType("solution")
    module.__file__ = path
    sys.modules["solution"] = module
    with open(path, encoding="utf-8", errors="surrogatepass") as file:
        exec(compile(file.read(), path, "exec"), module.__dict__)
    server = Server(module.__dict__)
    outcomes = [server.outcome(operation) for operation in asked["ops"]]
    _answer(output, {"outcomes": outcomes})


# ---- In the sandbox of the statements


class Unknown(Exception):
    """An outcome is needed that is not known yet."""


class ProgramError(Exception):
    """The program has raised something that is no error of Python, or has tried to end its process."""


class Unsupported(BaseException):
    """The statements do something that no program can be asked for."""


class Reference:
    """Something of the program: by its name, an attribute, or the result of an operation."""

    def __init__(self, log, target, is_known=True):
        """``is_known``: False for the result of an operation that is recorded, which only has to be done."""
        self.__dict__.update(_slipstream_log=log, _slipstream_target=target, _slipstream_is_known=is_known)

    def _slipstream_outcome(self, kind, arguments=()):
        return self._slipstream_log.outcome(kind, self._slipstream_sent()["of"], list(arguments))

    def _slipstream_sent(self):
        """Return the reference as an argument. Raises Unknown."""
        if not self._slipstream_is_known:
            raise Unknown
        return {"is": "reference", "of": self._slipstream_target}

    def _slipstream_value(self):
        """Return the plain data that this stands for, or a reference to an object. Raises Unknown."""
        is_object = self._slipstream_sent()["of"][0] == "result"
        return self if is_object else _known(self._slipstream_outcome("value"))

    def __call__(self, *positional, **named):
        return self._slipstream_outcome("call", [list(positional), named])

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Reference(self._slipstream_log, ["attr", self._slipstream_sent()["of"], name])

    def __setattr__(self, name, value):
        self._slipstream_outcome("setattr", [name, value])

    def __eq__(self, other):
        mine = self._slipstream_value()
        theirs = other._slipstream_value() if isinstance(other, Reference) else other
        if isinstance(mine, Reference) or isinstance(theirs, Reference):
            targets = [getattr(each, "_slipstream_target", None) for each in (mine, theirs)]
            return type(mine) is type(theirs) and targets[0] == targets[1]
        return mine == theirs

    def __ne__(self, other):
        return not self == other

    def __bool__(self):
        value = self._slipstream_value()
        return isinstance(value, Reference) or bool(value)

    def __hash__(self):
        return hash(json.dumps(self._slipstream_target))

    def __len__(self):
        return _known(self._slipstream_outcome("len"))

    def __str__(self):
        return _known(self._slipstream_outcome("str"))

    def __repr__(self):
        return _known(self._slipstream_outcome("repr"))

    def __iter__(self):
        return iter(_known(self._slipstream_outcome("iter")))

    def __contains__(self, item):
        if self._slipstream_log.is_made(self._slipstream_target):
            return _known(self._slipstream_outcome("contains", [item]))
        return item in list(self)

    def __getitem__(self, key):
        return self._slipstream_outcome("getitem", [key])

    def __setitem__(self, key, value):
        self._slipstream_outcome("setitem", [key, value])

    def __delitem__(self, key):
        self._slipstream_outcome("delitem", [key])


def _known(value):
    """Return an outcome. Raises Unknown if it is recorded only."""
    if isinstance(value, Reference):
        value._slipstream_sent()
    return value


def _computed(name):
    """Return a method that computes with the plain data that a reference stands for."""

    def method(self, *others):
        value = self._slipstream_value()
        if isinstance(value, Reference):
            raise TypeError("an object of the program is no plain data")
        others = [each._slipstream_value() if isinstance(each, Reference) else each for each in others]
        return getattr(value, name)(*others)

    return method


_COMPUTED = """
lt le gt ge add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow and or xor neg
abs round int float index
"""
for _name in _COMPUTED.split():
    setattr(Reference, f"__{_name}__", _computed(f"__{_name}__"))


class Operations:
    """Operations, the outcomes that are known, and the operations that are new.

    A function may be asked in another order than before, as long as no object of the program is in use: the
    outcome of the same operation is known. An object may change with each operation, and their order counts.
    """

    def __init__(self, operations, outcomes):
        self.operations = list(operations)
        self._outcomes = outcomes
        self.is_ordered = '["result", ' in json.dumps(operations)
        self._places = collections.defaultdict(collections.deque)
        for place, operation in enumerate(operations):
            self._places[json.dumps(operation)].append(place)
        self._next = 0
        self.is_recording = False

    def outcome(self, kind, target, arguments):
        """Return or raise what an operation has come to; a reference if that is not known yet."""
        operation = [kind, target, [self._one_sent(each) for each in arguments]]
        place = self._place(json.dumps(operation))
        if place is not None:
            return self._result(place, self._outcomes[place], arguments)
        if not self.is_recording and self.is_ordered:
            del self.operations[self._next :]  # they were recorded in another order than they are used in
        self.is_recording = True
        if len(self.operations) >= MOST_OPS:
            raise Unknown
        self.operations.append(operation)
        return Reference(self, ["result", len(self.operations) - 1], is_known=False)

    def is_made(self, target):
        """True for an object that a class of the program has made, by its name: its methods are under test.

        Any other object takes the place of data, and its ``__contains__`` could always agree.
        """
        if target[0] != "result":
            return False
        kind, called, _ = self.operations[target[1]]
        return kind == "call" and called[0] == "name" and called[1][:1].isupper()

    def _place(self, key):
        """Return the place of an operation whose outcome is known; None: there is none."""
        places = self._places.get(key)
        if self.is_ordered:
            if self.is_recording or not places or places[0] != self._next:
                return None
            self._next += 1
        return places.popleft() if places else None

    def _one_sent(self, value):
        if isinstance(value, Reference):
            return value._slipstream_known()
        try:
            sent = encoded(value)
        except TypeError as error:
            raise Unsupported(f"the program is given a value that is no plain data: {error}") from None
        if '{"is": "object"' in json.dumps(sent):
            raise Unsupported("the program is given a container with a value that is no plain data")
        return sent

    def _result(self, place, outcome, arguments):
        if "error" in outcome:
            _, known, text = outcome["error"]
            kind = getattr(builtins, str(known), None)
            ends_loops = (StopIteration, StopAsyncIteration)  # without a word, as in map()
            if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, ends_loops):
                try:
                    error = kind(text)
                except TypeError:
                    error = ProgramError(text)
                raise error
            raise ProgramError(text)
        if "left" in outcome and outcome.get("value", outcome) is None:  # whatever the program says
            _change(list(arguments), decoded(outcome["left"]))
        if "object" in outcome:
            return Reference(self, ["result", place])
        return decoded(outcome["value"])


def _change(value, left):
    """Change lists, dicts and sets in place into what a call of the program has left of them."""
    if type(value) is not type(left):
        return
    if isinstance(value, (list, tuple)):
        if len(value) == len(left):
            for mine, theirs in zip(value, left, strict=False):
                _change(mine, theirs)
        if isinstance(value, list):
            kept = [
                mine if type(mine) is type(theirs) and mine == theirs else theirs
                for mine, theirs in zip(value, left, strict=False)
            ]
            value[:] = kept + left[len(kept) :]
    elif isinstance(value, (dict, set)):
        value.clear()
        value.update(left)


class Names(dict):
    """The global names of statements. One that nobody defines is the program's."""

    def __init__(self, log, own):
        super().__init__(__name__="case")
        self._log = log
        self._own = own

    def __missing__(self, name):
        if name in self._own:
            return Reference(self._log, ["name", name])
        if hasattr(builtins, name):
            return getattr(builtins, name)
        if name in MODULES:
            return importlib.import_module(name)
        typing = importlib.import_module("typing")
        if name in typing.__all__:
            return getattr(typing, name)
        return Reference(self._log, ["name", name])


class Forgiving(ast.NodeTransformer):
    """Goes on with the next statement while operations are recorded."""

    def visit_Assert(self, node):
        return self._tried(node, "except Exception:\n    if not _slipstream_log.is_recording: raise")

    def visit_Expr(self, node):
        return self._tried(node, "except _slipstream_unknown:\n    if _slipstream_log.is_ordered: raise")

    def _tried(self, node, otherwise):
        again = ast.parse(f"try: pass\n{otherwise}").body[0]
        again.body = [node]  # pyright: ignore[reportAttributeAccessIssue]
        return ast.copy_location(again, node)


def check(asked):
    """Return the verdict of statements on a program, or the operations whose outcomes they need."""
    operations, outcomes = asked["ops"], []
    if operations:
        try:
            outcomes = json.loads(asked["answer"])["outcomes"]
            if len(outcomes) != len(operations):
                return {"passed": False}
        except (ValueError, TypeError, KeyError, RecursionError):
            return {"passed": False}
    log = Operations(operations, outcomes)
    names = Names(log, frozenset(asked["own"]))
    names.update(_slipstream_log=log, _slipstream_unknown=Unknown)
    random.seed(0)
    reason = ""
    try:
        tree = ast.parse(asked["statements"])
        if any(isinstance(node, (ast.Import, ast.ImportFrom)) for node in ast.walk(tree)):
            site.main()
        tree = ast.fix_missing_locations(Forgiving().visit(tree))
        exec(compile(tree, "case", "exec"), names)
    except Unsupported as error:
        return {"unsupported": str(error)}
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}"[:500] or "error"
    if log.is_recording:
        return {"ops": log.operations}
    if not operations:
        return {"unsupported": reason or "the statements use nothing of the program"}
    return {"passed": not reason}


# ---- Both


def _own_output():
    """Return the standard output, and let everything else be printed to the standard error."""
    output = os.dup(1)
    os.dup2(2, 1)
    return output


def _answer(output, answer):
    data = json.dumps(answer).encode()
    while data:
        data = data[os.write(output, data) :]


def main(role, *arguments):
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(0)
    if role == "serve":
        serve(*arguments)
    else:
        asked = json.loads(sys.stdin.buffer.read())
        output = _own_output()
        _answer(output, check(asked))


if __name__ == "__main__":
    main(*sys.argv[1:])
