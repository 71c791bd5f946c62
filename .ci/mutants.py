"""Mutation testing: do the tests notice when one expression of a file is changed?

    PYTHONPATH=.ci pytest -p mutants tests/rope tl_posgen/rope/planes.py     # tests, then files to change

mutmut's operators, in one pytest process that has collected everything and forks for every mutant: mutmut's own runner
rewrites functions, which jaxtyping's import hook does not survive. A mutant meets the tests that reach its function,
the quick ones first, up to the first that fails. equivalent_mutants.txt lists, with the reason, what none can notice.
"""

import difflib
import gc
import os
import random
import resource
import signal
import sys
import time
from collections import Counter, defaultdict
from multiprocessing import get_context
from pathlib import Path
from types import FunctionType

import hypothesis
import libcst as cst
import libcst.matchers as m
import torch
from _pytest.runner import runtestprotocol
from mutmut.mutation.mutators import mutation_operators

SECONDS, MEMORY = 60, 12 * 2**30  # a mutant whose test takes more is noticed
SKIPPED = m.Annotation() | m.Decorator() | m.ImportFrom() | m.Import() | m.Arg(keyword=m.Name("strict"))
AT_IMPORT = m.Assign(value=m.Subscript()) | m.Call(func=m.Name("field"))  # a type; how a field is made
ALONE = m.SimpleString(value=m.MatchIfTrue(lambda text: " " in text)) | m.Call(func=m.Name("zip"))  # messages; strict=
ITEMS = []  # the tests
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.txt")


def pytest_addoption(parser):
    parser.addoption("--sample", type=int, default=10**9, help="so many of all the mutants, drawn with seed 0")


def pytest_configure():
    phases = hypothesis.Phase.explicit, hypothesis.Phase.generate
    hypothesis.settings.register_profile("mutants", hypothesis.settings.get_profile("ci"), phases=phases)
    hypothesis.settings.load_profile("mutants")


def mutants_of(node, function=None):
    """(name of the outermost function around it, node, what mutmut would have there) of every mutant of a file."""
    if m.matches(node, SKIPPED) or (function is None and m.matches(node, AT_IMPORT)):
        return
    function = function or (node.name.value if isinstance(node, cst.FunctionDef) else None)
    for kind, operator in mutation_operators:
        if isinstance(node, kind) and not m.matches(node, ALONE):
            yield from ((function, node, other) for other in operator(node))
    for child in node.children:
        yield from mutants_of(child, function)


def pytest_collection_finish(session):
    ITEMS[:] = session.items


def pytest_runtestloop(session):
    files = {path: cst.parse_module(Path(path).read_text("utf-8")) for path in session.config.args if path[:2] == "tl"}
    mutants = [(path, *mutant) for path in files for mutant in mutants_of(files[path])]
    mutants = random.Random(0).sample(mutants, min(len(mutants), session.config.getoption("--sample")))
    with get_context("fork").Pool(1) as pool:  # a run leaves traces: doctests cannot run twice
        reached = pool.map(what_a_test_reaches, range(len(session.items)))
    modules = {path: sys.modules[path.removesuffix(".py").replace("/", ".")] for path in files}
    gc.unfreeze()  # tests/conftest.py froze what was imported
    live = {path: functions_of(module) for path, module in modules.items()}
    assert all(live.values()), "functions of a file were not found: mutants of it would change nothing"
    torch.testing.assert_close(torch.ones(1), torch.ones(1))  # imports seconds of other things, once for all forks
    gc.freeze()  # in a child, gc.get_objects() holds only what is newer than this
    known = {line.split("  # ")[0] for line in EQUIVALENT.read_text("utf-8").splitlines()}
    total = Counter()
    for path, parsed in files.items():
        score = Counter()
        for function, node, mutated in (mutant[1:] for mutant in mutants if mutant[0] == path):
            change, code = changed(parsed, node, mutated)
            tests = [n for n, (_, calls) in enumerate(reached) if (path, function) in calls]
            tests = [session.items[n] for n in sorted(tests, key=lambda n: reached[n][0])]
            if f"{path}: {change}" in known:
                score["equivalent"] += 1
            elif fork(modules[path], code, live[path], tests):
                score["killed"] += 1
            else:
                score["left"] += 1
                print(f"{path}: {change}  # {len(tests)} tests", flush=True)
        print(f"{path}: {in_words(score)}", flush=True)
        total += score
    told = total["killed"] + total["left"]
    print(f"all: {in_words(total)}; {total['killed'] / max(told, 1):.1%} of the {told} not equivalent killed")
    return True


def changed(parsed, node, mutated):
    """(what a mutant changes, in one line; its file's code)."""
    code = parsed.deep_replace(node, mutated).code
    diff = list(difflib.unified_diff(parsed.code.splitlines(), code.splitlines(), n=0))[3:]
    sides = (" ".join(" ".join(x[1:].split("  # ")[0] for x in diff if x[0] == sign).split()) for sign in "-+")
    return " => ".join(sides), code


def in_words(score):
    return f"{score['killed']}/{score.total()} killed, {score['equivalent']} equivalent, {score['left']} left"


def what_a_test_reaches(n):
    """Its seconds, and (file, name) of every function that it calls; (file, None) of every file it calls one of."""
    calls, here, begun = set(), f"{Path.cwd()}/", time.monotonic()

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(here):
            path = frame.f_code.co_filename.removeprefix(here)
            calls.update({(path, frame.f_code.co_name), (path, None)})

    sys.setprofile(note)
    reports = runtestprotocol(ITEMS[n], nextitem=ITEMS[n].session, log=False)  # what fixtures of the session made stays
    sys.setprofile(None)
    assert not any(report.failed for report in reports), f"{ITEMS[n].nodeid} fails without any mutant"
    return time.monotonic() - begun, calls


def functions_of(module):
    """Qualified name -> the functions of that name made in a module, in the order of their making."""
    found = defaultdict(list)
    for thing in gc.get_objects():
        if type(thing) is FunctionType and thing.__globals__ is vars(module):
            found[thing.__qualname__].append(thing)
    return found


def fork(module, code, live, tests):
    """How a fork of this process ends that takes over a mutant's functions and constants: 0 where all tests pass."""
    if child := os.fork():
        return os.waitpid(child, 0)[1]
    try:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        exchange(module, code, live)
        for test, after in zip(tests, [*tests[1:], None], strict=False):
            signal.alarm(SECONDS)
            if any(report.failed for report in runtestprotocol(test, nextitem=after, log=False)):
                os._exit(1)
        os._exit(0)
    finally:
        os._exit(2)  # the mutated file cannot even be imported


def exchange(module, code, live):
    held = dict(vars(module))
    exec(module.__loader__.source_to_code(code.encode(), module.__file__), vars(module))
    for name, functions in functions_of(module).items():
        for old, new in zip(live[name], functions, strict=False):
            old.__code__, old.__defaults__, old.__kwdefaults__ = new.__code__, new.__defaults__, new.__kwdefaults__
    for name, old in held.items():
        new = vars(module)[name]
        if callable(old) or repr(old) == repr(new):
            setattr(module, name, old)
            continue
        for other in list(sys.modules.values()):  # a constant, also where it was imported to
            if getattr(other, "__dict__", {}).get(name) is old:
                setattr(other, name, new)
