"""Mutation testing: do the tests notice when one expression of a file is changed?

    PYTHONPATH=.ci pytest -p mutants --mutate tl_posgen/rope/planes.py tl_posgen/rope tests/rope

mutmut's operators, applied in one pytest process that has collected everything and forks for every mutant: mutmut's own
runner rewrites functions, which jaxtyping's import hook does not survive. A mutant runs the tests that reach its
function, those of its own file first and then the quick ones, up to the first failure. Texts with a space in them are
messages, and are left alone.
"""

import gc
import json
import os
import random
import re
import resource
import signal
import sys
import time
from contextlib import suppress
from importlib import import_module
from itertools import zip_longest
from pathlib import Path
from types import FunctionType, ModuleType

import hypothesis
import libcst as cst
import pytest
from _pytest.runner import runtestprotocol
from libcst.matchers import Assign, Call, Name, Subscript, matches
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators

SECONDS = 60  # a mutant whose test takes longer is killed
MEMORY = 12 * 2**30
STRICT = re.compile(r", (strict=\w+)?\)")  # of zip: what is zipped has one length, as long as there is no bug
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.txt")


def pytest_addoption(parser):
    parser.addoption("--mutate", action="append", default=[], help="a file of the package")
    parser.addoption("--warm", action="store_true", help="keep what fixtures of the session made, models say")
    parser.addoption("--sample", type=int, help="so many of all the mutants, drawn with seed 0")


def pytest_configure(config):
    hypothesis.settings.register_profile(
        "mutants",
        derandomize=True,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
    )
    hypothesis.settings.load_profile("mutants")


class Mutants(cst.CSTVisitor):
    """(first line, last line of the function or statement, code) of every mutant of a file."""

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self, path):
        self.found, self.spans = [], []
        self.wrapper = MetadataWrapper(cst.parse_module(Path(path).read_text(encoding="utf-8")))
        self.wrapper.visit(self)

    def on_visit(self, node):
        place = self.get_metadata(PositionProvider, node, None)
        if isinstance(node, (cst.Annotation, cst.Decorator, cst.Import, cst.ImportFrom)):
            return False
        if isinstance(node, cst.Expr) and isinstance(node.value, cst.BaseString):  # a docstring
            return False
        if not self.spans and matches(node, Assign(value=Subscript()) | Call(func=Name("field"))):  # a type, a factory
            return False
        if isinstance(node, cst.FunctionDef):
            self.spans.append((min([place.start.line] + [self._line(d) for d in node.decorators]), place.end.line))
        for kind, operator in mutation_operators:
            if isinstance(node, kind) and not (isinstance(node, cst.SimpleString) and " " in node.value):
                self.found += [(node, mutated, place.start.line, self._span()) for mutated in operator(node)]
        return True

    def on_leave(self, node):
        if isinstance(node, cst.FunctionDef):
            self.spans.pop()

    def all(self):
        """(line, first and last line of the function around it or of the file, lines that differ, mutated file)."""
        module = self.wrapper.module
        for node, mutated, line, span in self.found:
            code = module.deep_replace(node, mutated).code
            if STRICT.sub(")", code) != STRICT.sub(")", module.code):
                yield line, span, changed_lines(module.code, code), code

    def _span(self):
        return self.spans[0] if self.spans else (0, sys.maxsize)

    def _line(self, node):
        return self.get_metadata(PositionProvider, node).start.line


def pytest_runtestloop(session):
    paths = session.config.getoption("--mutate")
    modules = {path: sys.modules[path.removesuffix(".py").replace("/", ".")] for path in paths}
    mutants = [(path, *mutant) for path in paths for mutant in Mutants(path).all()]
    if size := session.config.getoption("--sample"):
        mutants = sorted(random.Random(0).sample(mutants, min(size, len(mutants))), key=lambda m: (m[0], m[1]))
    here = (lambda function: function()) if session.config.getoption("--warm") else in_child
    reached, imported = here(lambda: what_tests_reach(session.items, {m.__file__ for m in modules.values()}))
    for name in imported:  # what tests import late is imported once
        with suppress(Exception):
            import_module(name)
    gc.collect()
    live = {path: functions_of(vars(module), gc.get_objects()) for path, module in modules.items()}
    gc.freeze()  # in a child, gc.get_objects() holds only what is newer than this
    known = {line.split("  # ")[0] for line in EQUIVALENT.read_text(encoding="utf-8").splitlines()}
    score = {path: [0, 0, 0] for path in paths}
    for path, line, span, change, code in mutants:
        own = {f"test_{Path(path).name}", Path(path).name}
        tests = [
            (item.path.name not in own, seconds, n)
            for n, (item, (seconds, lines)) in enumerate(zip(session.items, reached, strict=True))
            if any(span[0] <= at <= span[1] for file, at in lines if file == modules[path].__file__)
        ]
        tests = [session.items[n] for *_, n in sorted(tests)]
        if f"{path}: {change}" in known:
            score[path][1] += 1
        elif in_child(lambda: all_pass(tests, modules[path], code, live[path])):  # noqa: B023
            score[path][2] += 1
            print(f"{path}: {change}  # line {line}, {len(tests)} tests", flush=True)
        else:
            score[path][0] += 1
    for path, (killed, equivalent, left) in score.items():
        print(f"{path}: {killed + equivalent + left} mutants, {killed} killed, {equivalent} equivalent, {left} survive")
    killed, equivalent, left = (sum(column) for column in zip(*score.values(), strict=True))
    print(f"{killed / (killed + left):.1%} of {killed + left} that are not equivalent are killed")
    return True


def changed_lines(before, after):
    """The lines that differ: "x = a + b => x = a - b"."""
    before, after = ([line.split("  #")[0] for line in text.splitlines()] for text in (before, after))
    same = next(n for n, pair in enumerate(zip_longest(before, after)) if pair[0] != pair[1])
    alike = next(n for n, pair in enumerate(zip_longest(before[::-1], after[::-1])) if pair[0] != pair[1])
    alike = min(alike, len(before) - same, len(after) - same)
    parts = (" ".join(" ".join(lines[same : len(lines) - alike]).split()) for lines in (before, after))
    return " => ".join(parts)


def in_child(function):
    """What a function returns in a fork of this process; None where the fork dies or takes too long."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        with open(writing, "w") as out:
            try:
                json.dump(function(), out)
            except BaseException as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr)
            out.flush()
            os._exit(0)
    os.close(writing)
    with open(reading) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else None


def what_tests_reach(items, files):
    """Of every test, its seconds and the [file, first line] of every function of the files that it calls."""
    found = []
    for item, after in zip_longest(items, items[1:], fillvalue=items[0]):
        lines = set()

        def note(frame, event, _, lines=lines):
            if event == "call" and frame.f_code.co_filename in files:
                lines.add((frame.f_code.co_filename, frame.f_code.co_firstlineno))

        begun = time.monotonic()
        sys.setprofile(note)
        reports = runtestprotocol(item, nextitem=after, log=False)
        sys.setprofile(None)
        if any(report.failed for report in reports):
            print(f"fails without any mutant: {item.nodeid}", file=sys.stderr)
        found.append((time.monotonic() - begun, sorted(lines)))
    return found, list(sys.modules)


def all_pass(tests, module, code, live):
    """Puts a mutant in place of the module's functions and constants, and runs tests up to the first failure."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    mutated = ModuleType(module.__name__)
    mutated.__dict__.update(__file__=module.__file__, __loader__=module.__loader__, __package__=module.__package__)
    sys.modules[module.__name__] = mutated  # where dataclasses look for the names of their annotations
    try:
        exec(module.__loader__.source_to_code(code.encode(), module.__file__), vars(mutated))
    except Exception:
        return False
    finally:
        sys.modules[module.__name__] = module
    for name, functions in functions_of(vars(mutated), gc.get_objects()).items():
        for old, new in zip(live.get(name, []), functions, strict=False):
            old.__code__, old.__defaults__, old.__kwdefaults__ = new.__code__, new.__defaults__, new.__kwdefaults__
    for name, new in vars(mutated).items():
        old = vars(module).get(name)
        if not name.startswith("__") and not callable(old) and repr(old) != repr(new):
            for other in list(sys.modules.values()):
                if getattr(other, "__dict__", {}).get(name) is old:
                    setattr(other, name, new)
    for test, after in zip_longest(tests, tests[1:]):
        signal.alarm(SECONDS)
        if any(report.failed for report in runtestprotocol(test, nextitem=after, log=False)):
            return False
    return True


def functions_of(namespace, objects):
    """Qualified name -> the functions of that name whose globals are the namespace, in the order of their making."""
    found = {}
    for thing in objects:
        if type(thing) is FunctionType and thing.__globals__ is namespace:
            found.setdefault(thing.__qualname__, []).append(thing)
    return found
