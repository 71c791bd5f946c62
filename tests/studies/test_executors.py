"""Executors on jobs without a model: outcomes, what a killed worker costs, what starts again."""

import importlib.util
import os
import random
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import pytest
from killed import killed_until_done, written
from sweep_jobs import GROUPS, Quick, work

from tl_posgen.errors import InputError, OutputError
from tl_posgen.studies.on_ray import connected
from tl_posgen.studies.processes import local, processes

DRIVER = Path(__file__).parents[1] / "sweep_jobs.py"
NAMES = sorted(job.name for group in GROUPS for job in group)


def names_of(groups):
    return sorted(job.name for group in groups for job in group)


def test_local_runs_one_job_after_the_other(tmp_path):
    outcomes = list(local(GROUPS[:2], partial(work, out=str(tmp_path))))
    assert [one.job for one in outcomes] == [job.name for group in GROUPS[:2] for job in group]


def test_a_killed_worker_costs_its_job_and_nothing_else(tmp_path):
    groups = [[Quick("a"), Quick("b", kind="always killed"), Quick("c")], [Quick("d"), Quick("e")], [Quick("f")]]
    outcomes = {one.job: one for one in processes(groups, partial(work, out=str(tmp_path)), workers=2)}
    assert sorted(outcomes) == names_of(groups)
    lost = outcomes.pop("b")
    assert (lost.state, lost.why) == ("unfinished", "its worker was killed (SIGKILL)")
    assert {one.state for one in outcomes.values()} == {"finished"}
    log = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    assert sorted(name for name, _, _ in log) == sorted(outcomes)
    assert {threads for _, _, threads in log} == {"1"}
    assert len({process for _, process, _ in log}) > 1


def test_what_concerns_all_jobs_stops_them(tmp_path):
    groups = [[Quick("a", kind="fatal")], [Quick("b", 600.0)]]
    begun = time.monotonic()
    with pytest.raises(OutputError, match="no space"):
        list(processes(groups, partial(work, out=str(tmp_path)), workers=2))
    assert time.monotonic() - begun < 500  # nobody waits for the other worker
    assert not (tmp_path / "b").exists()


@pytest.mark.slow
def test_killed_twice_and_started_again_nothing_is_lost_or_done_twice(tmp_path):
    """A worker, then the driver, in the middle of eighteen jobs. Several processes start, hence seconds."""
    killed_until_done([sys.executable, str(DRIVER), str(tmp_path)], tmp_path, 2, random.Random(0))
    assert sorted(written(tmp_path)) == NAMES
    assert all((tmp_path / name).read_bytes() == name.encode() * 1000 for name in NAMES)
    done = [line.split()[0] for line in (tmp_path / "log").read_text().splitlines()]
    assert len(done) == len(set(done))


@pytest.mark.slow
def test_ray_that_is_not_installed_or_not_there_is_one_line(monkeypatch):
    if importlib.util.find_spec("ray"):
        code = "from tl_posgen.studies.on_ray import connected\nwith connected('127.0.0.1:1'): pass"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert "InputError: executor ray: no Ray at 127.0.0.1:1" in done.stderr.splitlines()[-1]
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"in a clone of tl_posgen: pip install '.\[ray\]'"), connected(None):
        pass


ON_RAY = """
import sys
from functools import partial
from sweep_jobs import Quick, work
from tl_posgen.errors import InputError, OutputError
from tl_posgen.studies.on_ray import connected, on_ray
out = partial(work, out=sys.argv[1])
groups = [[Quick("a"), Quick("b", kind="killed"), Quick("c")], [Quick("d"), Quick("e")]]
with connected(None):
    outcomes = list(on_ray(groups, out, bytes_needed=lambda job: 10**8))
    print(sorted((one.job, one.state) for one in outcomes))
    try:
        list(on_ray([[Quick("f", kind="fatal")]], out, bytes_needed=lambda job: 10**8))
    except OutputError as error:
        print("OutputError", error)
    try:
        list(on_ray([[Quick("g")]], out, bytes_needed=lambda job: 10**15))
    except InputError as error:
        print("InputError", error)
"""


@pytest.mark.slow
def test_ray_takes_up_what_a_killed_worker_left(tmp_path):
    """Ray itself starts, hence seconds; in a process of its own, as its warnings are not ours.

    What a crashed Ray left behind as its address, where Ray itself looks first, holds nobody up."""
    pytest.importorskip("ray", reason="Ray is not installed; the extra ray brings it")
    temporary = Path(tempfile.mkdtemp(dir="/tmp"))  # the names of Ray's sockets have to be short
    (temporary / "ray").mkdir()
    (temporary / "ray" / "ray_current_cluster").write_text("192.0.2.1:6379")
    beside = os.environ | {"PYTHONPATH": os.pathsep.join([str(DRIVER.parent), os.environ.get("PYTHONPATH", "")])}
    beside |= {"RAY_TMPDIR": str(temporary), "RAY_ADDRESS": ""}
    done = subprocess.run([sys.executable, "-c", ON_RAY, str(tmp_path)], capture_output=True, text=True, env=beside)
    assert done.returncode == 0, done.stderr
    outcomes, fatal, refused = done.stdout.splitlines()[-3:]
    assert outcomes == str([(name, "finished") for name in "abcde"])
    assert fatal == "OutputError no space"
    assert refused.startswith("InputError g needs about 1000000.0 GB, and the largest node of this Ray has ")
    log = [line.split()[0] for line in (tmp_path / "log").read_text().splitlines()]
    assert sorted(log) == list("abcde")
